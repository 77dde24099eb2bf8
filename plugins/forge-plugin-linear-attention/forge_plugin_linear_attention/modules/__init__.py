"""The torch modules that this distribution's component builds."""
