"""HTML."""


def html_page(results):
    raise NotImplementedError
