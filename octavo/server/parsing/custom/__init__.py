"""Custom tools, whose input is a text: they are shown to a model as functions of one argument."""
