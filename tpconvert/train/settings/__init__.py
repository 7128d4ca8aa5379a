"""The configuration: one YAML file, checked before anything else happens."""
