const toNumber = text => {
  const match = text.replaceAll(',', '').match(/^-?[\d.]+(e[-+]?\d+)?/); return match ? +match[0] : NaN };
const tables = [...document.querySelectorAll('table')], plots = [...document.querySelectorAll('.js-plotly-plot')];
const PRINTED_HEIGHT_PX = 380;  // two figures with their titles on a page
const PAPER_HEIGHT_PX = 900;  // of a figure of many rows, such as a map of nodes
const root = document.documentElement, dark = matchMedia('(prefers-color-scheme: dark)');

for (const table of tables) {
  const body = table.tBodies[0], filter = table.closest('section').querySelector('input');
  const headings = [...table.tHead.rows[0].cells];
  for (const row of body.rows) [...row.cells].forEach((cell, n) => cell.dataset.label = headings[n].textContent);
  filter?.addEventListener('input', () => { for (const row of body.rows)
    row.hidden = !row.textContent.toLowerCase().includes(filter.value.toLowerCase()) });
  headings.forEach((head, n) => head.addEventListener('click', () => {
    const descending = head.dataset.order !== 'descending';
    head.dataset.order = descending ? 'descending' : 'ascending';
    const rows = [...body.rows].sort((a, b) => {
      const textA = a.cells[n].textContent, textB = b.cells[n].textContent;
      const numberA = toNumber(textA), numberB = toNumber(textB);
      const order = isNaN(numberA) || isNaN(numberB) ? textA.localeCompare(textB) : numberA - numberB;
      return descending ? -order : order });
    body.append(...rows) }))
}

function fitToPage() {
  for (const table of tables) {
    table.classList.remove('stacked');
    table.classList.toggle('stacked', table.offsetWidth > table.parentElement.clientWidth + 1) }
  for (const box of document.querySelectorAll('.scroll'))  // a phone shows no scrollbar
    box.classList.toggle('wider', box.scrollWidth > box.clientWidth + 1)
}

function paintPlots() {
  const style = getComputedStyle(root), color = name => style.getPropertyValue(name).trim();
  const axis = { gridcolor: color('--grid'), zerolinecolor: color('--grid'), linecolor: color('--grid'),
    automargin: true };
  const layout = { font: { color: color('--ink') }, paper_bgcolor: color('--paper'), plot_bgcolor: color('--paper'),
    xaxis: axis, yaxis: axis };
  for (const plot of plots) Plotly.relayout(plot, { template: { layout } })
}

function resizePlots(printing) {
  for (const plot of plots) {
    plot.dataset.height ??= plot.layout.height;
    const height = +plot.dataset.height, width = plot.closest('.figure').clientWidth;
    const printed = Math.min(height, height > 2 * PRINTED_HEIGHT_PX ? PAPER_HEIGHT_PX : PRINTED_HEIGHT_PX);
    plot.parentElement.style.height = `${printing ? printed : height}px`;
    Plotly.relayout(plot, printing ? { width, height: printed }
      : { autosize: true, width: null, height }) }
}

function setPrinting(on) {
  root.classList.toggle('printing', on);
  fitToPage();
  if (dark.matches) paintPlots();
  resizePlots(on)
}

addEventListener('beforeprint', () => setPrinting(true));
addEventListener('afterprint', () => setPrinting(false));
addEventListener('resize', fitToPage);
dark.addEventListener('change', paintPlots);
fitToPage();
if (dark.matches) paintPlots();
