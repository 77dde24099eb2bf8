"""What the components of this plugin build."""
