"""Pictures of a plan, planned or measured: the door to text, SVG and Perfetto traces."""

from megadcp.plan.render_lengths import lengths_svg, lengths_text
from megadcp.plan.render_svg import gantt_svg
from megadcp.plan.render_text import text
from megadcp.plan.render_trace import perfetto

__all__ = ["gantt_svg", "lengths_svg", "lengths_text", "perfetto", "text"]
