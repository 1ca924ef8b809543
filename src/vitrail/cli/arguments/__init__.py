"""The arguments of every command, as frozen dataclasses. They answer `--help` and mistakes without torch."""
