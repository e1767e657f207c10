"""Reports: from run folders and results files to tables, figures and a page. It reads files, and needs no torch."""
