"""An OpenAI-compatible endpoint of an engine, which records what it samples."""
