"""The pages and lines that people look at: report, viewer, console, plan."""
