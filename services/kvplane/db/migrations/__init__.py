"""The schema's history, in the package so that an installed kvplane can migrate too."""
