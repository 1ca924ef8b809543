"""Files to models and back: vitrail's own format, timm, transformers and torchvision."""
