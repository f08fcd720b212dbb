"""Results by others on how Transformers learn, measured with the same tools."""
