"""Models and data sets. In your own project edit this folder, or import modules of your own."""
