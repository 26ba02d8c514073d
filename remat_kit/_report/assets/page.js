// What the other scripts share: the data, texts, colours. html.py joins the four files into one script.
// html_data.py writes the JSON in #data: tables are columns, texts are places in data.strings.
const data = JSON.parse(document.getElementById("data").textContent);
const text = (place) => data.strings[place];
const byId = (id) => document.getElementById(id);
const CATEGORY = data.categories.map(([name, colour]) => ({ name, colour }));
const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

// ---------- Data ----------

/** The rows that are alive at the peak: single buffers where they are listed, groups of equal ones otherwise. */
function atPeak() {
  const rows = data.buffers;
  const all = (columns) => columns.bytes.map((_, row) => row);
  if (!rows) return [data.holders, all(data.holders)];
  return [rows, data.peakEvent < 0 ? all(rows) : all(rows).filter((row) => rows.born[row] <= data.peakEvent && data.peakEvent < rows.dies[row])];
}

// ---------- Text ----------

// Made once: a formatter costs more than what it formats.
const WHOLE = new Intl.NumberFormat("en-US"), TWO = new Intl.NumberFormat("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const number = (value) => WHOLE.format(value);
/** Names in order, by the numbers in them. */
const byName = new Intl.Collator("en", { numeric: true });

/** Bytes as _units.format_bytes writes them. */
function bytes(count) {
  const unit = UNITS.find(([, size]) => Math.abs(count) >= size);
  if (!unit) return `${count} B`;
  return `${TWO.format(count / unit[1])} ${unit[0]}`;
}

function percent(part, whole) {
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return part && share < 0.05 ? "< 0.1%" : `${share.toFixed(1)}%`;
}

/** An element with properties and children; texts become text nodes, never markup. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

/** An identifier, which may break after a slash. */
function path(value) {
  return make("code", {}, ...value.split(/(?<=\/)/).flatMap((part, at) => (at ? [make("wbr"), part] : [part])));
}

/** The end of a module path, which tells more than its beginning. */
function tail(value) {
  const parts = value.split("/");
  let kept = parts.length - 1;
  while (kept > 0 && parts.slice(kept - 1).join("/").length <= 32) kept -= 1;
  return kept ? `…/${parts.slice(kept).join("/")}` : value;
}

function swatch(category) {
  const mark = make("i", { className: "swatch" });
  mark.style.background = CATEGORY[category].colour;
  return mark;
}

// ---------- Colours of the page, read anew when the theme changes ----------

const redraws = [];
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const redraw = () => redraws.forEach((each) => each());
dark.addEventListener("change", redraw);
// Paper is white: the page is light while it is printed.
window.addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light"; redraw(); });
window.addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; redraw(); });

function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["page", "ink", "muted", "rule", "accent", "peak", "strip"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

const FONT = getComputedStyle(document.body).fontFamily;

function newChart(element) {
  const chart = echarts.init(element, null, { renderer: "svg" });
  new ResizeObserver(([entry]) => { if (entry.contentRect.width) chart.resize(); }).observe(element);
  return chart;
}

/** Black or white, whichever reads better on a colour. */
function inkOn(colour) {
  const channel = (at) => {
    const value = parseInt(colour.slice(at, at + 2), 16) / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  };
  const luminance = 0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5);
  return luminance > 0.179 ? "#14171a" : "#ffffff";
}
