// Fills the table of buffers.

const AT_ONCE = 30, STEP = 500;

function buffers() {
  const [alive, aliveRows] = atPeak();
  const groups = data.holders;
  const scopes = [];
  if (data.buffers) {
    scopes.push({ name: `at the peak (${number(aliveRows.length)})`, columns: alive, rows: aliveRows });
    scopes.push({ name: `all listed (${number(data.buffers.bytes.length)})`, columns: data.buffers, rows: data.buffers.bytes.map((_, row) => row) });
  }
  if (groups.bytes.length) scopes.push({ name: `at the peak, equal ones grouped (${number(groups.bytes.length)})`, columns: groups, rows: groups.bytes.map((_, row) => row) });
  let scope = scopes[0];
  let sort = { key: "bytes", down: true };

  const word = (name) => (columns, row) => text(columns[name][row]);
  const figure = (name) => (columns, row) => columns[name][row];
  const code = (value) => (value ? path(value) : make("span", { className: "none" }, "–"));
  /** `file.py:12 (function)` on two lines. */
  function line(value) {
    const [, place, inside] = /^(.*?)(?: \((.*)\))?$/s.exec(value);
    return place ? make("span", { title: value }, place, inside ? make("small", {}, inside) : "") : code("");
  }
  const COLUMNS = [
    { key: "name", head: "buffer", value: (columns, row) => columns.name[row], cell: code, has: "name" },
    { key: "category", head: "category", value: (columns, row) => CATEGORY[columns.category[row]].name, cell: (value, columns, row) => make("span", { className: "category" }, swatch(columns.category[row]), value) },
    { key: "module", head: "module", value: word("module"), cell: code },
    { key: "source", head: "source line", value: word("source"), cell: line },
    { key: "phase", head: "made in", value: word("phase"), cell: (value) => value },
    { key: "shape", head: "shape", value: word("shape"), cell: code },
    { key: "layers", head: "layers", value: figure("layers"), cell: number, num: true },
    { key: "buffers", head: "buffers", value: figure("buffers"), cell: number, num: true, has: "buffers" },
    { key: "bytes", head: "bytes", value: figure("bytes"), cell: (value) => make("span", { title: `${number(value)} bytes` }, bytes(value)), num: true },
    { key: "share", head: "of peak", value: figure("bytes"), cell: (value, columns, row) => (lives(columns, row) ? percent(value, data.peak) : "–"), num: true },
    { key: "life", head: "alive", value: (columns, row) => columns.dies[row] - columns.born[row], cell: life, num: true, has: "born" },
  ];

  const lives = (columns, row) => !columns.born || data.peakEvent < 0 || (columns.born[row] <= data.peakEvent && data.peakEvent < columns.dies[row]);

  function life(_, columns, row) {
    const born = columns.born[row], dies = columns.dies[row], all = Math.max(1, data.events);
    const bar = make("i");
    bar.style.cssText = `left:${(100 * born) / all}%;width:${Math.min(100, (100 * (dies - born)) / all)}%`;
    const mark = make("b");
    mark.style.left = `${(100 * Math.max(0, data.peakEvent)) / all}%`;
    return make("span", { className: "life" }, `${number(born)}–${number(dies)}`, make("span", { ariaHidden: "true" }, bar, mark));
  }

  function found() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const category = byId("category").value;
    const { columns, rows } = scope;
    return rows.filter((row) => {
      if (category !== "" && columns.category[row] !== Number(category)) return false;
      if (!words.length) return true;
      const all = [columns.name ? columns.name[row] : "", CATEGORY[columns.category[row]].name, ...["module", "source", "phase", "shape"].map((name) => text(columns[name][row]))].join("\n").toLowerCase();
      return words.every((each) => all.includes(each));
    });
  }

  // The rows that were found, in order, and how many of them are in the table.
  let ordered = [];
  let seen = 0;
  const shownColumns = () => COLUMNS.filter((column) => !column.has || scope.columns[column.has]);
  const kind = (column) => `${column.num ? "num " : ""}c-${column.key}`;

  function draw() {
    const { columns } = scope;
    const shown = shownColumns();
    const by = shown.find((column) => column.key === sort.key) || shown.find((column) => column.key === "bytes");
    const sign = sort.down ? -1 : 1;
    const compare = by.num ? (a, b) => a - b : byName.compare;
    ordered = found().map((row) => [by.value(columns, row), row]);
    ordered.sort(([a, i], [b, j]) => sign * compare(a, b) || i - j);
    byId("buffer-table").tHead.replaceChildren(make("tr", {}, ...shown.map((column) => {
      const button = make("button", { type: "button" }, column.head);
      const head = make("th", { scope: "col", className: kind(column) }, button);
      if (column.key === by.key) head.ariaSort = sort.down ? "descending" : "ascending";
      button.addEventListener("click", () => {
        sort = { key: column.key, down: column.key === sort.key ? !sort.down : Boolean(column.num) };
        draw();
        byId("buffer-table").tHead.querySelector(`.c-${column.key} button`).focus();
      });
      return head;
    })));
    byId("buffer-table").tBodies[0].replaceChildren();
    seen = 0;
    extend(AT_ONCE);
    if (!ordered.length) byId("buffer-table").tBodies[0].append(make("tr", {}, make("td", { colSpan: shown.length, className: "empty" }, "Nothing matches the search.")));
  }

  /** Adds the next rows to the table. */
  function extend(more) {
    const { columns } = scope;
    const shown = shownColumns();
    byId("buffer-table").tBodies[0].append(...ordered.slice(seen, seen + more).map(([, row]) => make("tr", {}, ...shown.map((column) => make("td", { className: kind(column) }, column.cell(column.value(columns, row), columns, row))))));
    seen = Math.min(seen + more, ordered.length);
    const total = ordered.reduce((sum, [, row]) => sum + columns.bytes[row], 0);
    byId("count").textContent = `${seen < ordered.length ? `${number(seen)} of ` : ""}${number(ordered.length)} shown · ${bytes(total)} in all`;
    byId("more").hidden = seen >= ordered.length;
    byId("more").textContent = `Show ${number(Math.min(STEP, ordered.length - seen))} more`;
  }

  byId("scope").append(...scopes.map((each, at) => {
    const input = make("input", { type: "radio", name: "scope", checked: at === 0 });
    input.addEventListener("change", () => { scope = each; draw(); });
    return make("label", {}, input, each.name);
  }));
  byId("category").append(...CATEGORY.map(({ name }, index) => make("option", { value: String(index) }, name)));
  byId("search").addEventListener("input", draw);
  byId("category").addEventListener("change", draw);
  byId("more").addEventListener("click", () => extend(STEP));
  draw();
}

if (byId("buffer-table")) buffers();
