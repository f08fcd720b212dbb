"""From runs on disk to figures, tables and one self-contained HTML file."""
