"""Speech recognition by connectionist temporal classification, with our encoders and modes."""
