"""Reference engines by the dozen."""
