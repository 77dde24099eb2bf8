"""What the component `mla` builds."""
