from db.postgres import postgres, url

__all__ = ["postgres", "url"]
