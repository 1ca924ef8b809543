"""`vitrail data ...`: what can be done with sets of images."""
