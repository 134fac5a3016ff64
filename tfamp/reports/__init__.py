"""Plans, tables and pages for people, made from plain data."""
