"""The colours of charts and plots."""

# Colours that the colour-blind can tell apart (Okabe and Ito 2008), with grey for black, which a dark page hides.
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"]
