"""What every layer runs on: devices, processes and their group, signals, threads of the CPU."""
