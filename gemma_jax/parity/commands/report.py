"""`gemma-jax parity report`."""

import argparse

from gemma_jax.cli import EXIT_FAILED, EXIT_OK
from gemma_jax.parity.summary import load_result, text_table
from gemma_jax.parity.write import write_text


def run(args: argparse.Namespace) -> int:
    """Print the tables and write the page; 1 if a result has an unexplained difference."""
    results = [load_result(path) for path in args.results]
    if args.html:
        from gemma_jax.parity.report import html_page

        write_text(args.html, html_page(results))
    print("\n\n".join(map(text_table, results)))
    return EXIT_FAILED if any(r["failed"] for r in results) else EXIT_OK
