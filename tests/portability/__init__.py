"""The package without what only Unix has: its modules, its functions, its way to start processes, its file names."""
