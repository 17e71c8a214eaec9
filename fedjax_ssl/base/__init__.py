"""What every room may use: errors, files, imports of users' code, devices, and the fields of a configuration."""
