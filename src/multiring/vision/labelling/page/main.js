// The page: lists, keys and what they do to the current picture.
import { get, post, preview } from "./api.js";
import { Canvas } from "./canvas.js";
import { color, describe, grown, isShape, moved, bounds } from "./shapes.js";
import { Store } from "./store.js";

const by = (id) => document.getElementById(id);
const element = (name, text = "", values = {}) => { const made = Object.assign(document.createElement(name), values); made.textContent = text; return made; };
const KEYS = [["← →", "previous, next picture; move the chosen label (Shift: 10 pixels)"], ["Ctrl ←↑→↓", "size of the chosen box"], ["1 … 9, 0, C", "class of the chosen label, of the picture, or of new labels; C: choose by name"],
  ["V W B G", "tools: select, whole picture, box, polygon"], ["S, Shift S", "choose the next, previous label or proposal"], ["Enter", "a new box in the middle; a point of a polygon; else accept the proposals (a chosen one alone)"],
  ["F", "finish the polygon"], ["Delete", "delete the label, reject the proposal, take back a point"], ["N, X", "nothing in it; not labelled"], ["T, L", "new track for the label; the track ends here"], ["I", "fill the track between frames"],
  ["Ctrl Z, Ctrl Y", "undo, redo"], ["+ − M", "zoom in, out, fit"], ["Escape", "choose nothing, drop a polygon"]];

const page = {
  store: new Store(), classes: [], klass: "", tool: localStorage.getItem("multiring.tool") || "picture", chosen: -1, pictures: [], rejected: new Set(), confidences: {},

  // The labels, and after them the proposals that wait for an answer.
  visible() {
    const labels = (this.store.labels || []).map((label, index) => ({ label, index, isProposed: false }));
    const waiting = this.store.proposals.filter((p) => !this.rejected.has(JSON.stringify(p.label)));
    return [...labels, ...waiting.map((p) => ({ label: p.label, score: p.score, isProposed: true, source: p.source }))];
  },
  choose(number) { this.chosen = number; this.show(); const found = this.visible()[number]; if (found) say(`${found.isProposed ? "proposed: " : ""}${describe(found.label)}`); },
  answered(label) { this.rejected.add(JSON.stringify(label)); },

  add(shape) {
    if (!this.klass) { notice("Add a class first."); by("newclass").focus(); return; }
    const label = { class: this.klass, ...shape };
    if (this.store.picture.video && isShape(label)) label.track = this.newTrack();
    this.store.edit([{ do: "add", label }], [...(this.store.labels || []), label]);
    this.chosen = this.store.labels.length - 1;
    say(`added ${describe(label)}`); this.show();
  },
  newTrack() { return `${this.klass} ${Date.now().toString(36)}${Math.floor(Math.random() * 1296).toString(36)}`; },
  replace(number, label) {
    const found = this.visible()[number], labels = this.store.labels || [];
    if (found.isProposed) { this.answered(found.label); this.store.edit([{ do: "add", label, proposal: found.label }], [...labels, label]); this.chosen = labels.length; }
    else this.store.edit([{ do: "replace", index: found.index, label }], labels.map((each, i) => (i === found.index ? label : each)));
    this.show();
  },
  remove(number) {
    const found = this.visible()[number]; if (!found) return;
    if (found.isProposed) { this.answered(found.label); this.store.edit([{ do: "reject", proposal: found.label }], this.store.labels); }
    else this.store.edit([{ do: "delete", index: found.index }], this.store.labels.filter((_, i) => i !== found.index));
    this.chosen = -1; say("deleted"); this.show();
  },
  accept(number = -1) {
    const some = this.visible().filter((each, i) => each.isProposed && (number < 0 || i === number));
    if (!some.length) return;
    some.forEach((each) => this.answered(each.label));
    this.store.edit(some.map(({ label }) => ({ do: "add", label, proposal: label })), [...(this.store.labels || []), ...some.map((each) => each.label)]);
    this.chosen = -1; say(`accepted ${some.length}`); this.show();
  },
  nothing() {
    const waiting = this.visible().filter((each) => each.isProposed);
    waiting.forEach((each) => this.answered(each.label));
    this.store.edit([...waiting.map(({ label }) => ({ do: "reject", proposal: label })), { do: "nothing" }], []);
    this.chosen = -1; this.show();
  },
  useClass(name) {
    this.klass = name;
    const found = this.visible()[this.chosen];
    if (found) { if (found.label.class !== name) this.replace(this.chosen, { ...found.label, class: name }); }
    else if (this.tool === "picture") {
      const labels = this.store.labels || [], index = labels.findIndex((each) => !isShape(each));
      if (index < 0) this.add({}); else if (labels[index].class !== name) { this.replace(index, { ...labels[index], class: name }); this.chosen = -1; }
      this.chosen = -1;
    }
    this.show();
  },
  show() { render(); },
};
const { store } = page;
const canvas = new Canvas(by("canvas"), page);
const say = (text) => { by("said").textContent = text; };

function notice(text, buttons = []) {
  const place = by("notice");
  const key = text + buttons.map(([name]) => name).join();
  if (place.dataset.key === key) return;
  place.dataset.key = key; place.hidden = !text;
  place.replaceChildren(element("span", text), ...buttons.map(([name, act]) => { const b = element("button", name, { type: "button" }); b.onclick = act; return b; }));
}

function render() {
  const picture = store.picture; if (!picture) return;
  const visible = page.visible(), labels = store.labels;
  if (page.chosen >= visible.length) page.chosen = -1;
  by("state").textContent = picture.problem ? `cannot be used: ${picture.problem}` : labels === null ? "not labelled" : labels.length ? `${labels.length} label${labels.length > 1 ? "s" : ""}, last by ${picture.author || page.store.author}` : "seen, nothing in it";
  by("caption").textContent = `${picture.path} · ${picture.width} × ${picture.height}${picture.video ? ` · frame ${picture.frame} of ${picture.video}` : ""}`;
  by("canvas").setAttribute("aria-label", `${picture.path}, ${by("state").textContent}`);
  by("labels").replaceChildren(...visible.map((each, number) => {
    const item = element("li"), button = element("button", "", { type: "button", className: each.isProposed ? "proposed" : "" });
    button.setAttribute("aria-current", number === page.chosen);
    const swatch = element("i", "", { className: "swatch" }); swatch.style.background = color(page.classes, each.label.class);
    button.append(swatch, element("span", `${each.isProposed ? "proposed: " : ""}${describe(each.label)}${each.score != null ? ` ${Math.round(each.score * 100)} %` : ""}`));
    button.onclick = () => { page.choose(number); by("canvas").focus(); };
    item.append(button); return item;
  }));
  by("classes").replaceChildren(...page.classes.map((name, number) => {
    const button = element("button", "", { type: "button" });
    button.setAttribute("aria-pressed", name === page.klass);
    const swatch = element("i", "", { className: "swatch" }); swatch.style.background = color(page.classes, name);
    button.append(swatch, element("span", name)); if (number < 10) button.append(element("kbd", String((number + 1) % 10)));
    button.onclick = () => page.useClass(name); return button;
  }));
  for (const button of document.querySelectorAll("[data-tool]")) button.setAttribute("aria-pressed", button.dataset.tool === page.tool);
  by("accept").disabled = !visible.some((each) => each.isProposed); by("fill").disabled = !visible[page.chosen]?.label.track;
  by("counts").textContent = store.counts ? `since the start: ${store.counts.corrections} corrections, ${store.counts.accepted} proposals accepted` : "";
  if (store.conflict) notice(`${store.conflict.author || "Somebody"} changed this picture meanwhile. Your labels are shown and not saved.`, [["Keep mine", () => store.resolve(true)], ["Take theirs", () => store.resolve(false)]]);
  else notice(store.problem);
  canvas.draw();
}

const FILTERS = { all: () => true, open: (p) => p.labels === null, unsure: (p) => p.labels === null, done: (p) => p.labels !== null, empty: (p) => p.labels === 0 };
function listed() {
  const kind = by("filter").value;
  const found = page.pictures.filter((p) => FILTERS[kind](p) || p.path === store.picture?.path);
  if (kind === "unsure") found.sort((a, b) => (page.confidences[a.digest] ?? 2) - (page.confidences[b.digest] ?? 2));
  return found;
}
const MOST = 200; // rows around the current one: a list of 100,000 stays quick
function renderList() {
  const found = listed(), here = Math.max(0, found.findIndex((p) => p.path === store.picture?.path));
  const start = Math.max(0, Math.min(here - MOST / 2, found.length - MOST));
  by("list").replaceChildren(...found.slice(start, start + MOST).map((p) => {
    const item = element("li"), button = element("button", "", { type: "button", title: p.path });
    if (p.path === store.picture?.path) button.setAttribute("aria-current", "true");
    button.append(element("span", p.path), element("small", p.problem || p.is_missing ? "unusable" : p.labels === null ? "–" : p.labels === 0 ? "nothing" : String(p.labels)));
    button.onclick = () => go(p.path); item.append(button); return item;
  }));
  const current = by("list").querySelector("[aria-current]"), box = by("list"); // scrollIntoView would move the page, too
  if (current) box.scrollTop = Math.max(0, current.offsetTop - box.offsetTop - box.clientHeight / 2);
  const usable = page.pictures.filter((p) => !p.problem && !p.is_missing);
  by("progress").textContent = `${usable.filter((p) => p.labels !== null).length} of ${usable.length} labelled`;
}

async function refresh() { // what others changed since
  const since = Math.max(0, ...page.pictures.map((p) => p.change));
  const known = new Map(page.pictures.map((p) => [p.path, p]));
  for (const each of (await get("pictures", { since })).pictures) known.set(each.path, each);
  page.pictures = [...known.values()];
}

async function go(path) {
  try {
    if (!(await store.open(path))) { render(); return; }
    page.chosen = -1; page.rejected.clear(); canvas.reset();
    sessionStorage.setItem("multiring.path", path);
    await refresh();
    const next = listed()[listed().findIndex((p) => p.path === path) + 1];
    if (next && !next.problem && !next.is_missing) new Image().src = preview(next, 1600);
  } catch (error) { store.problem = error.message; }
  render(); renderList();
}
function step(by_) { const found = listed(), here = found.findIndex((p) => p.path === store.picture?.path); const next = found[here + by_]; if (next) go(next.path); else say("no more pictures"); }

async function act(done) { try { await done(); } catch (error) { store.problem = error.message; render(); } }
const undo = () => act(async () => { const path = await store.undo(); if (path) { page.rejected.clear(); page.chosen = -1; await refresh(); render(); renderList(); say(`took back the last change of ${path}`); } });
const fill = () => act(async () => {
  const label = page.visible()[page.chosen]?.label; if (!label?.track || !(await store.settled())) return;
  const told = await post("tracks", { video: store.picture.video, track: label.track, author: store.author });
  store.noteChange(told.change); await go(store.picture.path); say(`filled ${told.frames} frames`); notice(`Filled ${told.frames} frames.`);
});

function setTool(tool) { page.tool = tool; localStorage.setItem("multiring.tool", tool); canvas.points = []; canvas.cross = tool === "polygon" && store.picture ? canvas.size.map((v) => v / 2) : null; page.chosen = -1; render(); say(`tool: ${tool}`); }

function arrow(event) {
  const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const size = event.shiftKey ? 10 : 1, [dx, dy] = direction.map((v) => v * size), found = page.visible()[page.chosen];
  if (found && isShape(found.label)) {
    const label = event.ctrlKey || event.metaKey ? grown(found.label, dx, dy, canvas.size) : moved(found.label, dx, dy, canvas.size);
    canvas.drag = { number: page.chosen, label: canvas.drag?.byKey ? (event.ctrlKey ? grown(canvas.drag.label, dx, dy, canvas.size) : moved(canvas.drag.label, dx, dy, canvas.size)) : label, byKey: true };
    canvas.draw();
  } else if (page.tool === "polygon" && canvas.cross) {
    const far = event.shiftKey ? 1 : Math.max(1, Math.round(Math.max(...canvas.size) / 40));
    canvas.cross = canvas.cross.map((v, i) => Math.min(Math.max(v + direction[i] * far, 0), canvas.size[i])); canvas.draw();
  } else if (dx) step(Math.sign(dx)); else return false;
  return true;
}
function finishKeys() { // one change for keys that repeat
  const drag = canvas.drag; if (!drag?.byKey) return;
  canvas.drag = null; page.replace(drag.number, drag.label);
}

function enter() {
  const found = page.visible()[page.chosen], [w, h] = store.picture ? canvas.size : [0, 0];
  if (found?.isProposed) page.accept(page.chosen);
  else if (page.tool === "polygon" && canvas.cross && (canvas.points.length || !page.visible().some((each) => each.isProposed))) canvas.addPoint([...canvas.cross]);
  else if (page.visible().some((each) => each.isProposed)) page.accept();
  else if (page.tool === "box") {
    // Equal labels count once, so a box that still lies in the middle must not be met again.
    let step = 0.375;
    for (let tries = 0; tries < 24 && page.visible().some((each) => each.label.box?.[0] === w * step && each.label.box?.[1] === h * step); tries++) step = (step + 0.03125) % 0.75;
    page.add({ box: [w * step, h * step, w * 0.25, h * 0.25] });
  }
}

const LETTERS = {
  v: () => setTool("select"), w: () => setTool("picture"), b: () => setTool("box"), g: () => setTool("polygon"), n: () => page.nothing(), x: () => { store.edit([{ do: "forget" }], null); page.chosen = -1; render(); },
  s: () => page.choose(page.visible().length ? (page.chosen + 1) % page.visible().length : -1), S: () => page.choose(page.visible().length ? (page.chosen <= 0 ? page.visible().length : page.chosen) - 1 : -1),
  c: () => (by("classes").querySelector("[aria-pressed=true]") || by("classes").querySelector("button") || by("newclass")).focus(), f: () => canvas.closePolygon(), i: fill, "+": () => canvas.zoomBy(1.25), "=": () => canvas.zoomBy(1.25), "-": () => canvas.zoomBy(0.8), m: () => { canvas.zoom = 1; canvas.centre = null; canvas.draw(); }, "?": () => by("keys").showModal(),
  t: () => { const found = page.visible()[page.chosen]; if (found) page.replace(page.chosen, { ...found.label, track: page.newTrack() }); },
  l: () => { const found = page.visible()[page.chosen]; if (found?.label.track) page.replace(page.chosen, { ...found.label, attributes: [...(found.label.attributes || []).filter(([name]) => name !== "last"), ["last", "1"]] }); },
};

document.addEventListener("keydown", (event) => {
  const inField = event.target.closest("input, select, dialog"), onButton = event.target.closest("button");
  if (inField || !store.picture || store.conflict) return;
  const isCommand = event.ctrlKey || event.metaKey;
  let done = true;
  if (isCommand && event.key.toLowerCase() === "z" && !event.shiftKey) undo();
  else if (isCommand && (event.key.toLowerCase() === "y" || event.key.toLowerCase() === "z")) { store.again(); }
  else if (event.key.startsWith("Arrow")) done = !(onButton && event.target.closest("#list, #labels, #classes") && !event.key.match(/Left|Right/)) && arrow(event);
  else if (isCommand || event.altKey) done = false;
  else if (event.key === "Escape") { page.chosen = -1; canvas.points = []; canvas.drag = null; render(); }
  else if (event.key === "Enter") { if (onButton) done = false; else enter(); }
  else if (event.key === "Delete" || event.key === "Backspace") { if (canvas.points.length) { canvas.points.pop(); canvas.draw(); } else page.remove(page.chosen); }
  else if (!by("letters").checked || event.key === " ") done = false;
  else if (/^[0-9]$/.test(event.key)) { const name = page.classes[(Number(event.key) + 9) % 10]; if (name) page.useClass(name); }
  else if (LETTERS[event.key]) LETTERS[event.key](); else done = false;
  if (done) event.preventDefault();
});
document.addEventListener("keyup", (event) => { if (event.key.startsWith("Arrow")) finishKeys(); });
window.addEventListener("blur", finishKeys);
window.addEventListener("beforeunload", (event) => { if (store.queue.length || store.conflict) event.preventDefault(); });
window.addEventListener("resize", () => canvas.draw());

store.addEventListener("change", render);
store.addEventListener("saved", ({ detail }) => {
  const each = page.pictures.find((p) => p.path === detail.path);
  if (each) Object.assign(each, { labels: detail.labels === null ? null : detail.labels.length, change: Math.max(each.change, 0), author: detail.author });
  renderList();
});
for (const button of document.querySelectorAll("[data-tool]")) button.onclick = () => setTool(button.dataset.tool);
by("previous").onclick = () => step(-1); by("next").onclick = () => step(1);
by("undo").onclick = undo; by("help").onclick = () => by("keys").showModal();
by("accept").onclick = () => page.accept(); by("nothing").onclick = () => page.nothing(); by("forget").onclick = LETTERS.x; by("fill").onclick = fill;
by("filter").onchange = () => renderList();
by("author").onchange = (event) => { store.author = event.target.value.trim(); localStorage.setItem("multiring.author", store.author); };
by("adding").onsubmit = (event) => { event.preventDefault(); act(async () => { const name = by("newclass").value.trim(); page.classes = (await post("classes", { add: name })).classes; page.klass = name; by("newclass").value = ""; render(); by("canvas").focus(); }); };
by("scan").onclick = () => act(async () => { await post("scan", {}); page.pictures = (await get("pictures")).pictures; renderList(); if (store.picture) await go(page.pictures.some((p) => p.path === store.picture.path) ? store.picture.path : page.pictures[0].path); });
by("propose").onclick = () => act(async () => { await post("propose", { do: "start" }); watch(); });
async function watch() {
  const told = await get("proposals");
  page.confidences = told.confidences;
  by("proposing").textContent = told.problem ? `failed: ${told.problem}` : told.run ? `run ${told.run}: proposals for ${told.pictures} pictures${told.is_running ? " …" : ""}` : "";
  renderList();
  if (told.is_running) setTimeout(() => watch().catch(() => {}), 2000);
}
by("keylist").append(...KEYS.flatMap(([key, text]) => [element("dt", key), element("dd", text)]));
by("tokenform").onsubmit = (event) => { event.preventDefault(); post("session", { token: by("token").value }).then(() => { by("login").close(); start(); }, (error) => notice(error.message)); };

async function start() {
  let told;
  try { told = await get("project"); } catch (error) { if (error.status === 401) by("login").showModal(); else notice(error.message); return; }
  page.classes = told.classes; page.klass = told.classes[0] || ""; store.counts = told.counts;
  by("name").textContent = told.name; document.title = `${told.name} · label`;
  store.author = localStorage.getItem("multiring.author") || told.author || "guest"; by("author").value = store.author;
  page.pictures = (await get("pictures")).pictures;
  const known = (path) => page.pictures.some((p) => p.path === path);
  const first = [store.unsavedPath(), sessionStorage.getItem("multiring.path")].find(known) || (page.pictures.find((p) => p.labels === null) || page.pictures[0])?.path;
  if (first) await go(first); else notice("The folder has no picture yet.");
  by("canvas").focus(); await watch();
  document.body.dataset.ready = "yes";
}
start().catch((error) => notice(error.message));
