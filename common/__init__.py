"""Models and data sets. In your own project this folder is yours to edit."""
