"""Reports: tables, figures and a page from run folders and results files. Nothing here imports torch."""

from permuteformer.report.content import Report, build_report
from permuteformer.report.terminal import print_tables
from permuteformer.report.write import write_report

__all__ = ["Report", "build_report", "print_tables", "write_report"]
