// The side panel: all about the node, group or marked edge that was clicked last.

const MAX_LISTED = 40;

class DetailsPanel {
  constructor(panel, actions) {
    Object.assign(this, { panel, actions });
  }

  showNothing() {
    this.panel.replaceChildren(
      element("h2", {}, "Nothing selected"),
      element(
        "p",
        {},
        "Click a group to open it, a node for the reason of its dtype, a Cast on an edge for its tensors. Drag to move, use the wheel to zoom.",
      ),
    );
  }

  showMissing(name) {
    this.panel.replaceChildren(
      element("h2", {}, "Not found"),
      element("p", {}, `The address names ${name}, but the plan has no such node or group.`),
    );
  }

  show({ item, pill }) {
    if (pill) this.showPill(pill);
    else if (item.kind === "node") this.showNode(item.node);
    else this.showGroup(item);
    this.panel.scrollTop = 0;
  }

  showNode(node) {
    const dtype = element("dd");
    dtype.append(chip(node.dtype, node.color));
    this.panel.replaceChildren(
      nameElement("h2", { class: "name" }, node.name),
      facts([
        ["Op", node.op],
        ["Dtype", dtype],
        ["Reason", node.reason],
        ["Rule", node.rule],
        ["Function", node.scope],
        ["Cost", secondsText(node.cost)],
        ["The cost is", costSource(node)],
      ]),
      this.castList("Casts in", node.castsIn),
      this.castList("Casts out", node.castsOut),
      this.nodeList("Takes from", node.takes, this.notShown(node)),
      this.nodeList("Feeds", node.feeds),
    );
  }

  // What the plan names as inputs but holds no node of.
  notShown(node) {
    const found = new Set(node.takes.map((other) => other.name));
    return node.inputs.filter((name) => !found.has(name) && name !== node.name);
  }

  showGroup(item) {
    const nodes = nodesIn(item);
    const inside = new Set(nodes);
    const numbers = (key) => {
      const found = new Map();
      for (const node of nodes)
        if (node.color !== "outside") found.set(node[key], (found.get(node[key]) ?? 0) + 1);
      return frequent(found, 8);
    };
    const { into, out, within } = castsAround(nodes, inside);
    const costs = nodes.map((node) => node.cost).filter((cost) => cost !== null);
    this.panel.replaceChildren(
      nameElement("h2", { class: "name" }, item.title),
      this.groupButtons(item),
      facts([
        ["Nodes", count(item.size)],
        ["Dtypes", numbers("dtype")],
        ["Ops", numbers("op")],
        ["Rules", numbers("rule")],
        ["Cost", costs.length ? secondsText(costs.reduce((sum, cost) => sum + cost, 0)) : ""],
        ["Casts within", within.length ? `${count(within.length)}, ${castBytes(within)}` : ""],
      ]),
      this.castList("Casts in", into),
      this.castList("Casts out", out),
    );
  }

  groupButtons(item) {
    const bar = element("p", { class: "buttons" });
    const add = (text, action) => {
      const button = element("button", {}, text);
      button.addEventListener("click", action);
      bar.append(button);
    };
    add(item.open ? "Close" : "Open", () => this.actions.toggle(item));
    if (item.kind === "group") add("Filter table", () => this.actions.filter(`${item.title}/`));
    if (item.kind === "function")
      add("Filter table", () => this.actions.filter(`${item.title.replace(/^function /, "")}:`));
    return bar;
  }

  showPill({ links, casts }) {
    this.panel.replaceChildren(
      element("h2", {}, `${plural(casts.length, "Cast")} on an edge`),
      facts([
        ["From", links[0].from.title],
        ["To", links.map((link) => link.to.title).join(", ")],
      ]),
      this.castList("Casts", casts),
    );
  }

  castList(title, casts) {
    const section = element("section");
    if (!casts.length) return section;
    section.append(element("h3", {}, `${title}: ${count(casts.length)}, ${castBytes(casts)}`));
    const list = element("ul");
    for (const cast of casts.slice(0, MAX_LISTED)) {
      const entry = element("li");
      entry.append(
        this.nodeButton(cast.ends[0][0], cast.tensor),
        element(
          "small",
          {},
          `${cast.from} → ${cast.to}, ${bytesText(cast.bytes)}, for ${plural(cast.ends.length, "node")}`,
        ),
      );
      list.append(entry);
    }
    section.append(list, more(casts.length));
    return section;
  }

  nodeList(title, nodes, others = []) {
    const section = element("section");
    if (!nodes.length && !others.length) return section;
    section.append(element("h3", {}, `${title}: ${count(nodes.length + others.length)}`));
    const list = element("ul");
    for (const node of nodes.slice(0, MAX_LISTED)) {
      const entry = element("li");
      entry.append(
        this.nodeButton(node, node.name),
        element("small", {}, `${node.op}, ${node.dtype}`),
      );
      list.append(entry);
    }
    for (const name of others.slice(0, MAX_LISTED)) {
      const entry = element("li");
      entry.append(
        nameElement("span", {}, name),
        element("small", {}, "does not compute with floats, or is an argument"),
      );
      list.append(entry);
    }
    section.append(list, more(nodes.length));
    return section;
  }

  nodeButton(node, text) {
    const button = nameElement("button", { class: "link" }, text);
    button.addEventListener("click", () => this.actions.reveal(node));
    return button;
  }
}

function castsAround(nodes, inside) {
  const [into, out, within] = [new Set(), new Set(), new Set()];
  for (const node of nodes) {
    for (const cast of node.castsIn) if (!inside.has(cast.ends[0][0])) into.add(cast);
    for (const cast of node.castsOut) {
      (cast.ends.every(([, consumer]) => inside.has(consumer)) ? within : out).add(cast);
    }
  }
  return { into: [...into], out: [...out], within: [...within] };
}

// A list of terms; what has no value is left out.
function facts(pairs) {
  const list = element("dl");
  for (const [term, value] of pairs) {
    if (!value) continue;
    list.append(
      element("dt", {}, term),
      typeof value === "string" ? element("dd", {}, value) : value,
    );
  }
  return list;
}

function more(number) {
  return element("p", {}, number > MAX_LISTED ? `and ${count(number - MAX_LISTED)} more` : "");
}
