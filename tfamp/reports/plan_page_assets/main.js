// Puts the page together, and keeps the selected node in the address.
class Page {
  constructor(model) {
    this.model = model;
    this.details = new DetailsPanel(model, byId("details"), (node) => this.reveal(node));
    this.tables = [
      nodeTable(model, (node) => this.reveal(node)),
      castTable(model, (cast) => this.details.showCast(cast)),
      ruleTable(model, (rule) => this.filterByRule(rule)),
    ];
    this.makeTabs();
    drawTotals(model);
    this.followAddress();
    window.addEventListener("hashchange", () => this.followAddress());
  }

  reveal(node) {
    this.details.showNode(node);
    if (window.location.protocol === "about:") return; // In a frame of a report; it has no address.
    const wanted = new URLSearchParams({ select: place(node.scope, node.name) });
    // Replaced, not added: the way back leads out of the page, not through every click.
    window.history.replaceState(null, "", `#${wanted}`);
  }

  filterByRule({ rule, dtype }) {
    const [, dtypes, rules] = this.tables[0].choices;
    dtypes.select.value = dtype;
    rules.select.value = rule;
    this.showTable(0);
    this.tables[0].filterBy("");
  }

  makeTabs() {
    const bar = document.querySelector("[role=tablist]");
    this.tabs = this.tables.map((table, i) => {
      const tab = element("button", { role: "tab" }, `${table.name} (${count(table.rows.length)})`);
      tab.addEventListener("click", () => this.showTable(i));
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0;
        if (step) this.showTable((i + step + this.tabs.length) % this.tabs.length).focus();
      });
      bar.append(tab);
      byId("tables").append(table.panel);
      return tab;
    });
    this.showTable(0);
  }

  showTable(position) {
    this.tables.forEach((table, i) => {
      table.panel.hidden = i !== position;
      this.tabs[i].setAttribute("aria-selected", i === position);
      this.tabs[i].tabIndex = i === position ? 0 : -1;
    });
    this.tables[position].draw();
    return this.tabs[position];
  }

  // "#select=scope/node": a link to what one looks at.
  followAddress() {
    const name = new URLSearchParams(window.location.hash.slice(1)).get("select");
    if (!name) return;
    const node = this.model.nodes.find((each) => place(each.scope, each.name) === name);
    if (node) this.details.showNode(node);
    else this.details.say("Not found", `The address names ${name}, but the plan has no such node.`);
  }
}

function reportError(error) {
  const text = `The page's script failed: ${error?.message ?? error}`;
  byId("errors").hidden = false;
  byId("errors").textContent = text;
  document.documentElement.dataset.error = text;
}

window.addEventListener("error", (event) => reportError(event.error ?? event.message));
try {
  new Page(buildModel(JSON.parse(byId("plan").textContent)));
  document.documentElement.dataset.ready = "true";
} catch (error) {
  reportError(error);
  throw error;
}
