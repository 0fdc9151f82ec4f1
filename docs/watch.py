"""Watch it learn: the committed toy runs, with and without the KL penalty, as a page that one can step through."""


def page():
    """Markdown of the page."""
    return "# Watch it learn\n"
