// The drawing: open groups hold their own layered layout, closed ones are one box.

const HEADER = 26;
const PADDING = 14;
// A node that feeds more siblings than this, or takes from more, would tie everything together: its
// edges are drawn only while it is selected.
const MANY_EDGES = 12;
const MAX_TRACED = 300;

class GraphView {
  constructor(model, canvas, onSelect) {
    Object.assign(this, { model, canvas, onSelect, selected: null });
    this.layer = svgElement("g");
    this.viewport = new Viewport(canvas, this.layer);
    canvas.append(arrowHead(), this.layer);
    this.listen();
  }

  // ---- sizes and layout ----

  subtitle(item) {
    if (item.kind === "node") return `${item.node.op} · ${shortDtype(item.node.dtype)}`;
    const low = item.counts.low + item.counts.given;
    const part = item.size ? ` · ${Math.round((100 * low) / item.size)}% low` : "";
    return `${plural(item.size, "node")}${part}`;
  }

  label(item) {
    const mark = { function: "ƒ ", node: "" }[item.kind] ?? "";
    return mark + shorten(item.label);
  }

  measure(item) {
    const label = measureText(this.label(item), LABEL_FONT);
    const extra = item.kind === "node" ? 20 : 40;
    const small = measureText(shorten(this.subtitle(item)), SMALL_FONT);
    const width = Math.max(label + extra, small + 20, 76);
    if (item.kind === "node" || !item.open) {
      const height = item.kind === "node" ? 38 : 48;
      return { item, w: width, h: height, order: item.order };
    }
    const inner = this.layOut(item);
    return {
      item,
      w: Math.max(inner.w + 2 * PADDING, label + small + 130),
      h: inner.h + HEADER + 2 * PADDING,
      inner,
      order: item.order,
    };
  }

  // An open group's boxes and edges; kept until something in it opens or closes.
  layOut(item) {
    if (item.inner) return item.inner;
    const boxes = item.children.map((child) => this.measure(child));
    const boxOf = new Map(boxes.map((box) => [box.item, box]));
    const hidden = hubs(item);
    const edges = [];
    const pills = new Map();
    for (const link of item.links.values()) {
      if (hidden.has(link.from) || hidden.has(link.to)) continue;
      const [from, to] = [boxOf.get(link.from), boxOf.get(link.to)];
      if (link.casts.size) edges.push(...this.throughPill(link, from, to, pills));
      else edges.push({ from, to, link });
    }
    boxes.push(...pills.values());
    for (const box of boxes) if (hidden.has(box.item)) box.hub = hidden.get(box.item);
    item.inner = { boxes, edges, ...layered(boxes, edges) };
    return item.inner;
  }

  // A Cast is a node of the rewritten graph, so it gets a place of its own on its edge; edges that
  // share their Casts share it.
  throughPill(link, from, to, pills) {
    const casts = [...link.casts];
    const key = pairKey(
      link.from.id,
      casts.map((cast) => cast.name),
    );
    const made = !pills.has(key);
    if (made) pills.set(key, this.makePill(casts, from));
    const pill = pills.get(key);
    pill.pill.links.push(link);
    const edges = [{ from: pill, to, link }];
    return made ? [{ from, to: pill, link }, ...edges] : edges;
  }

  makePill(casts, from) {
    const targets = new Set(casts.map((cast) => cast.to));
    const many = casts.length > 1 ? `${count(casts.length)} Casts ` : "";
    const dtype = targets.size === 1 ? `→ ${shortDtype(casts[0].to)} ` : "";
    const text = `${many}${dtype}· ${castBytes(casts)}`;
    const color =
      targets.size > 1 ? "mixed" : casts[0].to === this.model.plan.dtype ? "low" : "float32";
    return {
      pill: { text, color, links: [], casts },
      w: measureText(text, SMALL_FONT) + 16,
      h: 18,
      order: from.order + 0.5,
    };
  }

  forgetLayout(item) {
    for (const each of pathTo(item)) each.inner = null;
  }

  // ---- drawing ----

  draw() {
    const root = this.layOut(this.model.root);
    this.size = { w: root.w, h: root.h };
    this.places = new Map();
    this.paths = new Map();
    this.layer.replaceChildren();
    this.drawInner(root, 0, 0, this.layer);
    this.overlay = svgElement("g", { class: "overlay" });
    this.layer.append(this.overlay);
    this.markSelected();
    this.viewport.transform();
  }

  drawInner(inner, x, y, parent) {
    for (const edge of inner.edges) {
      if (edge.points) parent.append(this.drawEdge(edge, x, y));
    }
    for (const box of inner.boxes) {
      if (box.pill) parent.append(this.drawPill(box, x, y));
      else this.drawItem(box, x + box.x, y + box.y, parent);
    }
  }

  drawEdge(edge, x, y) {
    const ends = edge.to.pill ? {} : { "marker-end": "url(#arrow)" };
    const path = svgElement("path", {
      class: edge.upward ? "edge upward" : "edge",
      d: curve(edge.points, x, y),
      ...ends,
    });
    if (!this.paths.has(edge.link)) this.paths.set(edge.link, []);
    this.paths.get(edge.link).push(path);
    path.style.strokeWidth = 1 + Math.min(2, Math.log10(Math.max(1, edge.link.edges)));
    return path;
  }

  drawPill(box, x, y) {
    const { pill } = box;
    const made = svgElement("g", {
      class: `pill ${pill.color}`,
      transform: `translate(${x + box.x},${y + box.y})`,
    });
    made.append(
      svgElement("title", {}, pillTitle(pill)),
      svgElement("rect", { width: box.w, height: box.h, rx: box.h / 2 }),
      svgElement("text", { x: box.w / 2, y: box.h / 2 + 4, class: "small" }, pill.text),
    );
    made.addEventListener("click", () => this.onSelect({ pill }));
    return made;
  }

  drawItem(box, x, y, parent) {
    const { item } = box;
    this.places.set(item, { x, y, w: box.w, h: box.h });
    const open = item.open && item.kind !== "node";
    const made = svgElement("g", {
      class: itemClass(item, open),
      transform: `translate(${x},${y})`,
      tabindex: 0,
      role: "button",
      "aria-label": `${item.title}, ${this.subtitle(item)}`,
      "data-item": item.id,
    });
    if (item.kind !== "node") made.setAttribute("aria-expanded", open);
    made.append(
      svgElement("title", {}, item.title),
      svgElement("rect", { class: "box", width: box.w, height: box.h, rx: 7 }),
    );
    if (open) this.dressOpen(made, item, box);
    else this.dressClosed(made, item, box);
    parent.append(made);
    if (open)
      this.drawInner(box.inner, x + (box.w - box.inner.w) / 2, y + HEADER + PADDING, parent);
  }

  dressClosed(made, item, box) {
    const sign = item.kind === "node" ? "" : "+ ";
    made.append(
      svgElement("text", { x: box.w / 2, y: 16, class: "label" }, sign + this.label(item)),
      svgElement("text", { x: box.w / 2, y: 31, class: "small" }, shorten(this.subtitle(item))),
    );
    if (item.kind !== "node") made.append(shareBar(item, 8, 38, box.w - 16));
    if (box.hub) {
      made.append(svgElement("text", { x: box.w / 2, y: box.h + 12, class: "small hub" }, box.hub));
    }
  }

  dressOpen(made, item, box) {
    const close = svgElement("g", { class: "close", "data-close": item.id });
    close.append(
      svgElement("title", {}, "Close this group"),
      svgElement("rect", { width: 22, height: 18, x: 4, y: 4, rx: 4 }),
      svgElement("text", { x: 15, y: 17, class: "label" }, "−"),
    );
    const label = svgElement("text", { x: 32, y: 17, class: "label start" }, this.label(item));
    label.append(svgElement("tspan", { class: "small", dx: 8 }, shorten(this.subtitle(item))));
    made.append(close, label, shareBar(item, box.w - 58, 10, 50));
  }

  // ---- selection ----

  select(item) {
    this.selected = item;
    this.markSelected();
  }

  markSelected() {
    for (const name of ["selected", "takes", "feeds"]) {
      this.layer.querySelectorAll(`.${name}`).forEach((each) => each.classList.remove(name));
    }
    this.overlay?.replaceChildren();
    if (!this.selected || !this.overlay) return;
    const item = shown(this.selected);
    this.layer.querySelector(`[data-item="${item.id}"]`)?.classList.add("selected");
    this.trace(item);
  }

  // Marks the edges of what is selected. A node's edges that are not drawn by themselves, as they
  // cross the border of a group or belong to a hub, are drawn on top; a group has too many for that.
  trace(item) {
    const inside = new Set(nodesIn(item));
    for (const side of ["takes", "feeds"]) {
      const others = new Set();
      for (const node of inside) {
        for (const other of node[side]) if (!inside.has(other)) others.add(shown(other.item));
      }
      for (const other of [...others].slice(0, MAX_TRACED)) {
        const [from, to] = side === "takes" ? [other, item] : [item, other];
        const link = siblingLink(from, to);
        const own = item.kind !== "node" || link.from === item || link.to === item;
        const drawn = own ? this.paths.get(link) : null;
        if (drawn) drawn.forEach((path) => path.classList.add(side));
        else this.overlay.append(this.traceAcross(from, to, side));
      }
    }
  }

  traceAcross(from, to, side) {
    const d = straightCurve(this.places.get(from), this.places.get(to));
    return svgElement("path", { class: `trace ${side}`, d, "marker-end": "url(#arrow)" });
  }

  open(item) {
    for (const each of pathTo(item)) {
      if (each.kind !== "node") each.open = true;
    }
    this.forgetLayout(item);
    // A group that holds all there is needs no click of its own.
    const whole = item.children.find((child) => child.kind !== "node" && child.size === item.size);
    if (whole) this.open(whole);
  }

  close(item) {
    item.open = false;
    this.forgetLayout(item);
  }

  // Opens or closes a group where it is on the screen.
  toggle(item, open) {
    const before = this.places.get(item);
    if (open) this.open(item);
    else this.close(item);
    this.draw();
    const after = this.places.get(item);
    if (before && after)
      this.viewport.moveBy(
        (before.x - after.x) * this.viewport.scale,
        (before.y - after.y) * this.viewport.scale,
      );
    if (open) this.bringIntoView(item, 0.55);
  }

  fit(least) {
    this.viewport.frame({ x: 0, y: 0, ...this.size }, least);
  }

  bringIntoView(item, least) {
    this.viewport.bringIntoView(this.places.get(shown(item)), least);
  }

  listen() {
    this.canvas.addEventListener("click", (event) => this.onClick(event));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  onClick(event) {
    if (this.viewport.dragged) return;
    const close = event.target.closest("[data-close]");
    if (close) this.toggle(this.model.items[close.dataset.close], false);
    else this.activate(event.target.closest("[data-item]"));
  }

  activate(box) {
    if (!box) return;
    const item = this.model.items[box.dataset.item];
    if (item.kind !== "node" && !item.open) this.toggle(item, true);
    this.onSelect({ item });
  }

  onKey(event) {
    const step = 60;
    const moves = {
      ArrowLeft: [step, 0],
      ArrowRight: [-step, 0],
      ArrowUp: [0, step],
      ArrowDown: [0, -step],
    };
    const box = event.target.closest("[data-item]");
    if (moves[event.key]) this.viewport.moveBy(...moves[event.key]);
    else if (event.key === "+" || event.key === "-")
      this.viewport.zoom(event.key === "+" ? 1.25 : 0.8);
    else if (event.key === "0") this.fit(MIN_SCALE);
    else if (box && (event.key === "Enter" || event.key === " ")) this.onEnter(box);
    else return;
    event.preventDefault();
  }

  onEnter(box) {
    const item = this.model.items[box.dataset.item];
    if (item.kind !== "node" && item.open) this.toggle(item, false);
    else this.activate(box);
    this.layer.querySelector(`[data-item="${item.id}"]`)?.focus();
  }
}

// Items whose edges are left out, with what to write next to them.
function hubs(group) {
  const found = new Map();
  const ends = new Map(group.children.map((child) => [child, { into: [], from: [] }]));
  for (const link of group.links.values()) {
    ends.get(link.from).from.push(link);
    ends.get(link.to).into.push(link);
  }
  for (const [item, { into, from }] of ends) {
    if (item.kind !== "node") continue;
    if (!into.length && from.length > MANY_EDGES) found.set(item, hubText("feeds", from));
    if (!from.length && into.length > MANY_EDGES) found.set(item, hubText("takes", into));
  }
  return found;
}

function hubText(word, links) {
  const casts = [...new Set(links.flatMap((link) => [...link.casts]))];
  const text = `${word} ${links.length}`;
  return casts.length ? `${text}, ${plural(casts.length, "Cast")} · ${castBytes(casts)}` : text;
}

function itemClass(item, open) {
  if (item.kind === "node") return `item node ${item.node.color}`;
  return `item group ${item.kind} ${open ? "opened" : "closed"}`;
}

function pillTitle({ casts }) {
  const lines = casts
    .slice(0, 12)
    .map((cast) => `${cast.tensor}: ${cast.from} → ${cast.to}, ${bytesText(cast.bytes)}`);
  if (casts.length > 12) lines.push(`and ${casts.length - 12} more`);
  return lines.join("\n");
}
