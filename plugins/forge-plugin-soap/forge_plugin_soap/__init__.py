"""SOAP, Adam in the eigenbasis of Shampoo's preconditioner: type `soap` of kind `optimizer`."""

from forge_plugin_soap.soap import SOAP

__all__ = ["SOAP"]
