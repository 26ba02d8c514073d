// Draws what is alive over the step, and names what is at one moment of it.

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

if (byId("timeline-chart")) timeline();
