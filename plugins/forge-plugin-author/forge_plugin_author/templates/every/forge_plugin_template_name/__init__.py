"""The template_kind template_name for Forge."""

from forge_plugin_template_name.template_name import TemplateName

__all__ = ["TemplateName"]
