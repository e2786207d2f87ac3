"""Measurements that need no running cluster, and one that does. Each is a program; none is imported by Baton."""
