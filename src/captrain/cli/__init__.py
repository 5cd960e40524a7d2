"""The command line: one module a group of commands, without logic of its own."""
