// Draws the time line, the map of modules and the table of buffers from the JSON in #data.
// html_data.py writes that JSON: tables are columns, texts are places in data.strings.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const text = (place) => data.strings[place];
  const byId = (id) => document.getElementById(id);
  const CATEGORY = data.categories.map(([name, colour]) => ({ name, colour }));
  const UNITS = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

  // ---------- Text ----------

  // Made once: a formatter costs more than what it formats.
  const WHOLE = new Intl.NumberFormat("en-US"), TWO = new Intl.NumberFormat("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  const number = (value) => WHOLE.format(value);

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

  // ---------- The time line ----------

  const LARGEST = 8;

  function timeline() {
    const line = data.timeline;
    const chart = newChart(byId("timeline-chart"));
    const events = line.events;
    const last = events[events.length - 1];
    const totals = events.map((_, at) => line.bytes.reduce((sum, series) => sum + series[at], 0));
    const highest = Math.max(...totals, ...(data.before ? data.before.bytes : [0]));
    const [unit, size] = UNITS.find(([, each]) => highest >= each) || ["B", 1];
    const shown = CATEGORY.map((_, index) => index).filter((index) => line.bytes[index].some((value) => value));
    const hidden = new Set();
    const peakAt = placeOf(data.peakEvent);
    let kept = peakAt;
    let current = -1;

    /** The place of the last drawn event that is not after `event`. */
    function placeOf(event) {
      let low = 0, high = events.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (events[middle] <= event) low = middle; else high = middle - 1;
      }
      return low;
    }

    // Areas are drawn from the top sum down, each over the one before: a value axis does not stack steps by itself.
    function areas() {
      const sums = events.map(() => 0);
      const series = shown.map((index) => {
        line.bytes[index].forEach((value, at) => { if (!hidden.has(index)) sums[at] += value; });
        const points = events.map((event, at) => [event, sums[at] / size]);
        points.push([last + 1, sums[events.length - 1] / size]);
        return {
          id: `c${index}`, name: CATEGORY[index].name, type: "line", step: "end", symbol: "none", silent: true,
          animation: false,
          // A line in the same colour keeps a moment visible that is narrower than a pixel.
          lineStyle: { width: hidden.has(index) ? 0 : 1, color: CATEGORY[index].colour },
          areaStyle: { color: CATEGORY[index].colour, opacity: 1 }, emphasis: { disabled: true },
          data: points, z: 10 + shown.length - shown.indexOf(index),
        };
      });
      return series.reverse();
    }

    // A lane for each phase, with a bar where it runs.
    const PHASES = [...new Set(line.phase.map(text))].sort((a, b) => order(a) - order(b));
    function order(phase) {
      const known = ["update", "backward", "recompute", "forward"].indexOf(phase);
      return known < 0 ? -1 : known;
    }

    function lanes(colours) {
      return PHASES.map((phase, lane) => {
        const points = [];
        line.phase.forEach((place, at) => {
          if (text(place) !== phase) return;
          const begins = at === 0 || text(line.phase[at - 1]) !== phase;
          if (begins) points.push([events[at], lane]);
          const ends = at + 1 === events.length || text(line.phase[at + 1]) !== phase;
          if (ends) points.push([at + 1 < events.length ? events[at + 1] : last + 1, lane], [null, null]);
        });
        return {
          id: `p${phase}`, type: "line", xAxisIndex: 1, yAxisIndex: 1, symbol: "none", silent: true, animation: false,
          lineStyle: { width: 8, cap: "butt", color: colours.strip }, connectNulls: false, data: points,
          emphasis: { disabled: true }, tooltip: { show: false },
        };
      });
    }

    function marks(colours) {
      const right = events[peakAt] > last * 0.8;
      const label = {
        show: true, formatter: `live peak ${bytes(totals[peakAt])}`, color: colours.peak, fontWeight: 600, fontSize: 12,
        fontFamily: FONT, position: "end", align: right ? "right" : "left", distance: 6, padding: [0, 0, 0, 0],
      };
      const found = [{
        id: "marks", type: "line", data: [], animation: false, silent: true, z: 40,
        markLine: {
          // Behind the areas: it points at the peak and does not cover it.
          silent: true, animation: false, symbol: "none", z: 5, lineStyle: { color: colours.peak, width: 1.5, type: "solid" },
          data: [{ xAxis: events[peakAt], label }],
        },
      }];
      if (data.before) {
        // The other program has other events: its step is stretched to the length of this one.
        const scale = last / Math.max(1, data.before.events[data.before.events.length - 1]);
        found.push({
          id: "before", name: "before", type: "line", step: "end", symbol: "none", silent: true, animation: false, z: 39,
          lineStyle: { color: colours.ink, width: 1.5, type: [5, 3] }, emphasis: { disabled: true },
          data: data.before.events.map((event, at) => [event * scale, data.before.bytes[at] / size]),
        });
      }
      return found;
    }

    function draw() {
      const colours = theme();
      const label = { color: colours.muted, fontSize: 12, fontFamily: FONT };
      const lanesHeight = 16 * PHASES.length;
      const axis = { type: "value", min: 0, max: last + 1, splitLine: { show: false }, axisPointer: { show: true, snap: true, label: { show: false }, lineStyle: { color: colours.ink, width: 1, type: "solid" } } };
      chart.setOption({
        textStyle: { fontFamily: FONT },
        grid: [
          { left: 84, right: 20, top: 34, bottom: 92 + lanesHeight },
          { left: 84, right: 20, height: lanesHeight, bottom: 84 },
        ],
        xAxis: [
          { ...axis, gridIndex: 0, axisLabel: { show: false }, axisTick: { show: false }, axisLine: { lineStyle: { color: colours.rule } } },
          { ...axis, gridIndex: 1, axisLabel: { ...label, formatter: (event) => (Number.isInteger(event) ? number(event) : ""), hideOverlap: true, showMaxLabel: false }, axisTick: { show: false }, axisLine: { show: false }, name: "event of the heap trace", nameLocation: "middle", nameGap: 26, nameTextStyle: label },
        ],
        yAxis: [
          { type: "value", gridIndex: 0, min: 0, axisLabel: { ...label, formatter: (value) => `${number(value)} ${unit}` }, splitLine: { lineStyle: { color: colours.rule } } },
          { type: "value", gridIndex: 1, min: -0.5, max: PHASES.length - 0.5, interval: 0.5, axisLine: { show: false }, axisTick: { show: false }, splitLine: { show: false }, axisLabel: { ...label, showMinLabel: false, showMaxLabel: false, formatter: (value) => PHASES[value] || "" } },
        ],
        axisPointer: { link: [{ xAxisIndex: "all" }], triggerTooltip: true },
        tooltip: {
          trigger: "axis", confine: true, transitionDuration: 0, backgroundColor: colours.page, borderColor: colours.rule,
          padding: [4, 8], textStyle: { color: colours.ink, fontSize: 12, fontFamily: FONT },
          extraCssText: "max-width:320px;white-space:normal;overflow-wrap:anywhere",
          formatter: () => {
            if (current < 0) return "";
            const box = make("div", {}, make("strong", {}, bytes(totals[current])), ` in ${text(line.phase[current])}`);
            const module = text(line.module[current]);
            if (module) box.append(make("br"), tail(module));
            return box;
          },
        },
        dataZoom: [
          { id: "inside", type: "inside", xAxisIndex: [0, 1], zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, filterMode: "none", minValueSpan: 8 },
          { id: "slider", type: "slider", xAxisIndex: [0, 1], height: 18, bottom: 12, filterMode: "none", minValueSpan: 8, brushSelect: false, showDetail: false, showDataShadow: false,
            borderColor: colours.rule, fillerColor: `${colours.accent}33`, backgroundColor: "transparent", handleStyle: { color: colours.page, borderColor: colours.accent }, moveHandleSize: 0 },
        ],
        series: [...areas(), ...marks(colours), ...lanes(colours)],
      });
    }

    // What is alive at a moment: the largest buffers, and every category's bytes in the legend.
    const values = new Map();
    function legend() {
      byId("legend").append(...shown.map((index) => {
        const value = make("span", { className: "num" });
        values.set(index, value);
        const button = make("button", { type: "button" }, swatch(index), make("span", {}, CATEGORY[index].name), value);
        button.setAttribute("aria-pressed", "true");
        button.addEventListener("click", () => {
          if (hidden.has(index)) hidden.delete(index); else hidden.add(index);
          button.setAttribute("aria-pressed", String(!hidden.has(index)));
          chart.setOption({ series: areas() });
        });
        return make("li", {}, button);
      }));
      if (data.before) {
        const key = make("span", { className: "before" }, make("i", { className: "dash" }), make("span", {}, "before, stretched"));
        byId("legend").append(make("li", {}, key));
      }
    }

    function show(at) {
      if (at === current) return;
      current = at;
      const event = events[at];
      const name = at === peakAt ? "The live peak" : at === kept ? "Moment kept" : "Moment";
      const places = [["phase", text(line.phase[at])], ["module", text(line.module[at])], ["instruction", text(line.instruction[at])]];
      const list = make("dl", {}, ...places.map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, !value ? "not known" : key === "phase" ? value : path(value)))));
      byId("moment-head").replaceChildren(
        make("h3", {}, name, make("span", { className: "hint" }, `event ${number(event)}`)),
        make("p", { className: "value" }, ...split(bytes(totals[at]))), list,
      );
      values.forEach((value, index) => { value.textContent = line.bytes[index][at] ? bytes(line.bytes[index][at]) : "0"; });
      const rows = data.buffers;
      if (!rows) {
        byId("moment-rest").textContent = "This record lists no single buffers.";
        return;
      }
      const alive = rows.bytes.map((_, row) => row).filter((row) => rows.born[row] <= event && event < rows.dies[row]);
      alive.sort((a, b) => rows.bytes[b] - rows.bytes[a] || a - b);
      const listed = alive.reduce((sum, row) => sum + rows.bytes[row], 0);
      byId("moment-buffers").replaceChildren(...alive.slice(0, LARGEST).map((row) => make("li", {},
        swatch(rows.category[row]),
        make("span", { className: "name" }, make("code", {}, rows.name[row]), make("small", {}, [tail(text(rows.module[row])), text(rows.shape[row])].filter(Boolean).join(" · "))),
        make("span", { className: "num" }, bytes(rows.bytes[row])),
      )));
      const rest = alive.length - LARGEST;
      const others = rest > 0 ? `and ${number(rest)} more listed buffer${rest > 1 ? "s" : ""}. ` : "";
      byId("moment-rest").textContent = others + (listed < totals[at] ? `${bytes(totals[at] - listed)} is in buffers too small to be listed.` : "");
    }

    function split(amount) {
      const [value, word] = amount.split(" ");
      return [`${value} `, make("small", {}, word)];
    }

    function point(at) {
      show(at);
      chart.dispatchAction({ type: "updateAxisPointer", x: chart.convertToPixel({ xAxisIndex: 0 }, events[at]), y: 60, currTrigger: "mousemove" });
    }

    // Zoom.
    function range() {
      const zoom = chart.getOption().dataZoom[0];
      return [zoom.startValue ?? 0, zoom.endValue ?? last + 1];
    }
    function zoomTo(begin, end) {
      const least = Math.min(8, last + 1);
      const width = Math.min(last + 1, Math.max(least, end - begin));
      const from = Math.max(0, Math.min(begin, last + 1 - width));
      chart.dispatchAction({ type: "dataZoom", startValue: from, endValue: from + width });
    }
    function zoomBy(factor) {
      const [begin, end] = range();
      const at = events[kept];
      const centre = at >= begin && at <= end ? at : (begin + end) / 2;
      zoomTo(centre - (centre - begin) * factor, centre + (end - centre) * factor);
    }
    byId("zoom-in").addEventListener("click", () => zoomBy(0.5));
    byId("zoom-out").addEventListener("click", () => zoomBy(2));
    byId("zoom-all").addEventListener("click", () => zoomTo(0, last + 1));
    byId("zoom-peak").addEventListener("click", () => {
      keep(peakAt);
      const width = Math.max(8, (last + 1) / 12);
      zoomTo(events[peakAt] - width / 2, events[peakAt] + width / 2);
    });

    function keep(at) {
      kept = at;
      current = -1;
      point(at);
    }
    chart.on("updateAxisPointer", (happened) => {
      const found = (happened.axesInfo || []).find((each) => each.axisDim === "x");
      if (found) show(placeOf(found.value));
    });
    chart.getZr().on("globalout", () => show(kept));
    chart.getZr().on("click", () => { if (current >= 0) { const at = current; kept = at; current = -1; show(at); } });
    byId("timeline-chart").addEventListener("keydown", (pressed) => {
      if (pressed.ctrlKey || pressed.metaKey || pressed.altKey) return;
      const step = pressed.shiftKey ? 10 : 1;
      const moves = { ArrowLeft: kept - step, ArrowRight: kept + step, Home: 0, End: events.length - 1, p: peakAt, P: peakAt };
      if (!(pressed.key in moves)) return;
      pressed.preventDefault();
      keep(Math.max(0, Math.min(events.length - 1, moves[pressed.key])));
      const [begin, end] = range();
      if (events[kept] < begin || events[kept] > end) zoomTo(events[kept] - (end - begin) / 2, events[kept] + (end - begin) / 2);
    });

    legend();
    draw();
    show(peakAt);
    redraws.push(draw);
  }

  // ---------- The map of modules ----------

  /** The rows that are alive at the peak: single buffers where they are listed, groups of equal ones otherwise. */
  function atPeak() {
    const rows = data.buffers;
    const all = (columns) => columns.bytes.map((_, row) => row);
    if (!rows) return [data.holders, all(data.holders)];
    return [rows, data.peakEvent < 0 ? all(rows) : all(rows).filter((row) => rows.born[row] <= data.peakEvent && data.peakEvent < rows.dies[row])];
  }

  const NOWHERE = "outside of modules";

  /** A tree of module paths; each node has its bytes in all, by category, and its parts. */
  function tree(merge) {
    const [rows, alive] = atPeak();
    const root = { name: "all", total: 0, by: new Map(), parts: new Map(), parent: null };
    for (const row of alive) {
      const count = rows.bytes[row];
      if (!count) continue;
      const block = rows.block ? text(rows.block[row]) : "";
      const path = text(rows.module[row]) ? text(rows.module[row]).split("/") : [NOWHERE];
      let node = root;
      for (const part of [null, ...path]) {
        if (part !== null) {
          const name = merge && block && part === block ? part.replace(/\d+$/, "*") : part;
          if (!node.parts.has(name)) node.parts.set(name, { name, total: 0, by: new Map(), parts: new Map(), parent: node });
          node = node.parts.get(name);
        }
        node.total += count;
        node.by.set(rows.category[row], (node.by.get(rows.category[row]) || 0) + count);
      }
    }
    return root;
  }

  const byName = new Intl.Collator("en", { numeric: true });
  const ranked = (map, value) => [...map].sort((a, b) => value(b[1]) - value(a[1]) || byName.compare(a[0], b[0]));
  const partsOf = (node) => ranked(node.parts, (part) => part.total).map(([, part]) => part);
  /** Bytes by category that belong to the node itself and not to a module below it. */
  function own(node) {
    const left = new Map(node.by);
    node.parts.forEach((part) => part.by.forEach((count, category) => left.set(category, left.get(category) - count)));
    return ranked(left, (count) => count).filter(([, count]) => count > 0);
  }
  const chain = (node) => (node.parent ? [...chain(node.parent), node] : [node]);

  function modules() {
    const chart = newChart(byId("module-chart"));
    let root, here;

    function open(node) {
      here = node;
      draw();
    }

    /** Down to the first node with more than one part: a path that does not fork says nothing. */
    function fork(node) {
      while (node.parts.size === 1 && !own(node).length) node = partsOf(node)[0];
      return node;
    }

    function leaves(categories, colours, whole) {
      return categories.map(([category, count]) => {
        const { name, colour } = CATEGORY[category];
        return {
          name, value: count, whole, itemStyle: { color: colour, borderColor: colours.page, borderWidth: 0, gapWidth: 1 },
          label: { color: inkOn(colour), formatter: `${name}\n${bytes(count)}` },
        };
      });
    }

    // Two levels of modules below the one that is open; what lies deeper is summed by category.
    function nodes(node, depth, colours) {
      const inner = partsOf(node).filter((part) => part.total).map((part) => {
        const end = fork(part);
        const deeper = depth < 2 && end.parts.size > 0;
        const [[top]] = ranked(part.by, (count) => count);
        const name = chain(end).slice(chain(node).length).map((each) => each.name).join("/");
        return {
          name, value: part.total, path: part, id: chain(part).map((each) => each.name).join("/"),
          itemStyle: { color: CATEGORY[top].colour, borderColor: depth === 1 ? colours.strip : colours.rule, borderWidth: depth === 1 ? 2 : 1, gapWidth: 1 },
          upperLabel: { show: true, height: depth === 1 ? 22 : 18, color: depth === 1 ? colours.page : colours.ink, fontWeight: depth === 1 ? 600 : 400, formatter: `${name}  ${bytes(part.total)}` },
          label: { color: inkOn(CATEGORY[top].colour) },
          children: deeper ? nodes(end, depth + 1, colours) : leaves(ranked(part.by, (count) => count), colours, part.total),
        };
      });
      return [...inner, ...leaves(own(node), colours, node.total)];
    }

    function draw() {
      const colours = theme();
      chart.setOption({
        textStyle: { fontFamily: FONT },
        tooltip: {
          confine: true, transitionDuration: 0, backgroundColor: colours.page, borderColor: colours.rule, padding: [6, 10],
          textStyle: { color: colours.ink, fontSize: 12, fontFamily: FONT }, extraCssText: "max-width:420px;white-space:normal;overflow-wrap:anywhere",
          formatter: ({ data: each, treePathInfo }) => {
            const box = make("div");
            const way = treePathInfo.slice(1).map((part) => part.name);
            box.append(make("strong", {}, way.join(" / ") || here.name), make("br"), `${bytes(each.value || here.total)} · ${percent(each.value || here.total, data.peak)} of the peak`);
            return box;
          },
        },
        series: [{
          id: "modules", type: "treemap", left: 0, right: 0, top: 0, bottom: 0, roam: false, nodeClick: false, animation: false,
          breadcrumb: { show: false }, visibleMin: 60, childrenVisibleMin: 900, squareRatio: 1.2,
          label: { show: true, fontSize: 12, fontFamily: FONT, overflow: "truncate", padding: [4, 6], position: "insideTopLeft", lineHeight: 16 },
          upperLabel: { fontSize: 12, fontFamily: FONT, overflow: "truncate", padding: [0, 6] },
          itemStyle: { borderColor: colours.page, borderWidth: 0, gapWidth: 2 },
          emphasis: { disabled: true },
          data: nodes(here, 1, colours),
        }],
      }, { notMerge: true });
      crumbs();
      list();
    }

    function crumbs() {
      const way = chain(here);
      byId("module-path").replaceChildren(...way.flatMap((node, at) => {
        const name = at === 0 ? "all modules" : node.name;
        if (at === way.length - 1) return [make("span", { ariaCurrent: "page" }, name, make("span", { className: "hint" }, ` ${bytes(node.total)}`))];
        const button = make("button", { type: "button", className: "link" }, name);
        button.addEventListener("click", () => open(node));
        return [button, make("span", { className: "slash" }, "/")];
      }));
    }

    function list() {
      const parts = partsOf(here).filter((part) => part.total);
      const most = Math.max(1, ...parts.map((part) => part.total), ...own(here).map(([, count]) => count));
      const line = (label, count, by) => {
        const bar = make("span", { className: "stack" });
        bar.style.width = `${(100 * count) / most}%`;
        bar.append(...by.map(([category, size]) => {
          const piece = make("i", { title: `${CATEGORY[category].name}: ${bytes(size)}` });
          piece.style.cssText = `flex:${size} 0 0;background:${CATEGORY[category].colour}`;
          return piece;
        }));
        return make("li", {}, make("div", {}, label, make("span", { className: "num" }, bytes(count)), make("span", { className: "num share" }, percent(count, data.peak))), bar);
      };
      const items = parts.map((part) => {
        const end = fork(part);
        const name = chain(end).slice(chain(here).length).map((each) => each.name).join("/");
        if (!end.parts.size && part.by.size < 2) return line(make("span", { className: "name" }, name), part.total, [...part.by]);
        const button = make("button", { type: "button", className: "link name" }, name);
        button.addEventListener("click", () => open(end));
        return line(button, part.total, ranked(part.by, (count) => count));
      });
      const itself = own(here).map((each) => line(make("span", { className: "name itself" }, CATEGORY[each[0]].name), each[1], [each]));
      byId("module-list").replaceChildren(...items, ...itself);
    }

    // A click on a tile opens the module directly below the open one that the tile is in.
    chart.on("click", ({ treePathInfo }) => {
      const name = treePathInfo && treePathInfo[1] && treePathInfo[1].name;
      const part = partsOf(here).find((each) => chain(fork(each)).slice(chain(here).length).map((node) => node.name).join("/") === name);
      if (part && (fork(part).parts.size || part.by.size > 1)) open(fork(part));
    });
    function begin() {
      root = tree(byId("merge").checked);
      // Where nearly all is in one module, its parts say more than it does.
      const [largest] = partsOf(root);
      here = largest && largest.total >= 0.98 * root.total ? fork(largest) : root;
      draw();
    }
    byId("merge").addEventListener("change", begin);
    if (!data.buffers) byId("merge-label").hidden = true;
    begin();
    redraws.push(draw);
  }

  // ---------- The table of buffers ----------

  const AT_ONCE = 30, STEP = 500;

  function buffers() {
    const [alive, aliveRows] = atPeak();
    const groups = data.holders;
    const when = data.peak === null ? "throughout" : "at the peak";
    const scopes = [];
    if (data.buffers) {
      scopes.push({ name: `${when} (${number(aliveRows.length)})`, columns: alive, rows: aliveRows });
      scopes.push({ name: `all listed (${number(data.buffers.bytes.length)})`, columns: data.buffers, rows: data.buffers.bytes.map((_, row) => row) });
    }
    if (groups.bytes.length) scopes.push({ name: `${when}, equal ones grouped (${number(groups.bytes.length)})`, columns: groups, rows: groups.bytes.map((_, row) => row) });
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

  if (byId("timeline-chart")) timeline();
  if (byId("module-chart")) modules();
  if (byId("buffer-table")) buffers();
})();
