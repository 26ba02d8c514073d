// Draws the map of modules: who holds the live peak.

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

if (byId("module-chart")) modules();
