"""What a run or several of them have to show, read from the files in their folders."""

from fedjax_ssl.report.comparison import write_comparison
from fedjax_ssl.report.run_report import write_report

__all__ = ["write_comparison", "write_report"]
