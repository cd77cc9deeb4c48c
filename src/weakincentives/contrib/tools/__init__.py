"""Tools that are ready to be offered to a model."""

from typing import TYPE_CHECKING

from weakincentives.lazy import lazy_names

if TYPE_CHECKING:
    from weakincentives.contrib.tools.browser import Browser, Page
    from weakincentives.contrib.tools.files import (
        FileWriteParams,
        FileWritten,
        file_write_tool,
        write,
    )
    from weakincentives.contrib.tools.web import (
        ScrapedPage,
        ScrapeParams,
        scrape,
        web_scrape_tool,
    )

__all__ = [
    "Browser",
    "FileWriteParams",
    "FileWritten",
    "Page",
    "ScrapeParams",
    "ScrapedPage",
    "file_write_tool",
    "scrape",
    "web_scrape_tool",
    "write",
]

if not TYPE_CHECKING:  # a type checker shall still find a misspelled name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "browser": ["Browser", "Page"],
            "files": ["FileWriteParams", "FileWritten", "file_write_tool", "write"],
            "web": ["ScrapeParams", "ScrapedPage", "scrape", "web_scrape_tool"],
        },
    )
