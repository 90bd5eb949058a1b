"""Configuration: the ``*Args`` dataclasses, gin loading, and the shipped presets (``*.gin`` in this folder)."""
