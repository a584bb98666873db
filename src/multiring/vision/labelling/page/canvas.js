// The picture as SVG: labels, proposals, and what a pointer does to them.
import { preview } from "./api.js";
import { bounds, boxOf, clamp, color, isShape, maskImage, moved, reshaped } from "./shapes.js";

const make = (name, values = {}) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  return made;
};

export class Canvas {
  zoom = 1; centre = null; drag = null; points = []; cross = null;

  constructor(svg, page) {
    this.svg = svg; this.page = page; this.pointers = new Map();
    svg.addEventListener("pointerdown", (e) => this.down(e));
    svg.addEventListener("pointermove", (e) => this.move(e));
    svg.addEventListener("pointerup", (e) => this.up(e));
    svg.addEventListener("pointercancel", () => { this.drag = null; this.pointers.clear(); this.draw(); });
    svg.addEventListener("dblclick", () => this.closePolygon());
    svg.addEventListener("wheel", (e) => { e.preventDefault(); this.zoomBy(e.deltaY < 0 ? 1.25 : 0.8, this.at(e)); }, { passive: false });
  }

  get size() { const p = this.page.store.picture; return [p.width, p.height]; }

  at(event) {
    const p = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
    return [p.x, p.y];
  }

  reset() { this.zoom = 1; this.centre = null; this.points = []; this.drag = null; this.cross = null; this.pointers.clear(); }

  zoomBy(factor, around = this.centre) {
    const next = Math.min(40, Math.max(1, this.zoom * factor));
    const [w, h] = this.size; const now = this.centre || [w / 2, h / 2]; around ||= now;
    this.centre = clamp(now.map((c, i) => around[i] + (c - around[i]) * this.zoom / next), this.size);
    this.zoom = next; if (next === 1) this.centre = null;
    this.draw();
  }

  draw() {
    const { store, chosen, classes } = this.page;
    const picture = store.picture;
    if (!picture || picture.problem) { this.svg.replaceChildren(); return; }
    const [w, h] = this.size; const [cx, cy] = this.centre || [w / 2, h / 2];
    this.svg.setAttribute("viewBox", `${cx - w / 2 / this.zoom} ${cy - h / 2 / this.zoom} ${w / this.zoom} ${h / this.zoom}`);
    const side = this.zoom > 2 && Math.max(w, h) > 1600 ? 0 : 1600;
    const href = preview(picture, side);
    if (this.image?.getAttribute("href") !== href) this.image = make("image", { href, width: w, height: h, preserveAspectRatio: "none" });
    const px = this.pixel();
    const parts = [this.image];
    this.page.visible().forEach((each, number) => {
      const shown = this.drag?.number === number && this.drag.label ? this.drag.label : each.label;
      parts.push(...this.shape(shown, color(classes, shown.class), number === chosen, each.isProposed, px, number));
    });
    if (this.drag?.box) parts.push(...this.shape({ class: this.page.klass, box: this.drag.box }, color(classes, this.page.klass), true, false, px));
    if (this.points.length) parts.push(make("polyline", { class: "shape chosen", points: [...this.points, ...(this.cross ? [this.cross] : [])].join(" "), stroke: color(classes, this.page.klass), fill: "none" }));
    if (this.cross) for (const [x1, y1, x2, y2] of [[this.cross[0], 0, this.cross[0], h], [0, this.cross[1], w, this.cross[1]]]) parts.push(make("line", { class: "cross", x1, y1, x2, y2 }));
    this.svg.replaceChildren(...parts);
  }

  pixel() { const scale = this.svg.getScreenCTM()?.a; return scale ? 1 / scale : 1; }

  shape(label, stroke, isChosen, isProposed, px, number = "") {
    if (!isShape(label)) return [];
    const kind = `shape${isChosen ? " chosen" : ""}${isProposed ? " proposed" : ""}`;
    const common = { class: kind, stroke, fill: stroke, "data-number": number };
    if (label.mask) { const [width, height] = label.mask.size; return [make("image", { href: this.maskOf(label.mask, stroke), width, height, opacity: isChosen ? 0.7 : 0.45, "data-number": number })]; }
    const [l, t, r, b] = bounds(label);
    const parts = label.box ? [make("rect", { ...common, x: l, y: t, width: r - l, height: b - t })] : label.polygon.map((line) => make("polygon", { ...common, points: line.join(" ") }));
    const text = make("text", { x: l + 4 * px, y: Math.max(t - 5 * px, 14 * px), "font-size": 13 * px });
    text.textContent = `${label.class}${isProposed ? "?" : ""}`;
    parts.push(text);
    if (isChosen && number !== "") {
      const handles = label.box ? [[l, t, 0], [r, t, 1], [l, b, 2], [r, b, 3]] : label.polygon.flatMap((line, i) => line.map(([x, y], k) => [x, y, `${i},${k}`]));
      parts.push(...handles.map(([x, y, handle]) => make("rect", { class: "handle", x: x - 5 * px, y: y - 5 * px, width: 10 * px, height: 10 * px, "data-handle": handle })));
    }
    return parts;
  }

  maskOf(mask, fill) {
    this.masks ??= new WeakMap();
    if (!this.masks.has(mask)) this.masks.set(mask, maskImage(mask, fill));
    return this.masks.get(mask);
  }

  down(event) {
    const { store, tool } = this.page;
    if (!store.picture || store.picture.problem || store.conflict || event.button > 1) return;
    this.svg.focus({ preventScroll: true }); event.preventDefault();
    this.svg.setPointerCapture(event.pointerId);
    const at = this.at(event);
    this.pointers.set(event.pointerId, at);
    if (event.button === 1 || this.pointers.size > 1) { this.drag = { pan: at, from: [event.clientX, event.clientY], centre: this.centre || this.size.map((v) => v / 2) }; return; }
    const handle = event.target.dataset?.handle, number = event.target.dataset?.number;
    if (handle !== undefined) { this.drag = { number: this.page.chosen, handle: handle.includes(",") ? handle.split(",").map(Number) : Number(handle), from: at }; return; }
    if (tool === "box") { this.drag = { from: at, box: null, isNew: true }; return; }
    if (tool === "polygon") { this.addPoint(at); return; }
    if (number) { this.page.choose(Number(number)); this.drag = { number: Number(number), from: at }; } else this.page.choose(-1);
  }

  move(event) {
    if (!this.drag) return;
    const at = this.at(event), drag = this.drag;
    if (drag.pan) { const px = this.pixel(); this.centre = clamp([drag.centre[0] - (event.clientX - drag.from[0]) * px, drag.centre[1] - (event.clientY - drag.from[1]) * px], this.size); }
    else if (drag.isNew) drag.box = boxOf(drag.from, at, this.size);
    else {
      const { label } = this.page.visible()[drag.number];
      drag.label = drag.handle === undefined ? moved(label, at[0] - drag.from[0], at[1] - drag.from[1], this.size) : reshaped(label, drag.handle, at, this.size);
    }
    this.draw();
  }

  // A change begins to exist here: a drag that never ends changes nothing.
  up(event) {
    this.pointers.delete(event.pointerId);
    const drag = this.drag; this.drag = null;
    if (drag?.isNew) { if (drag.box && Math.min(drag.box[2], drag.box[3]) > 2 * this.pixel()) this.page.add({ box: drag.box }); else { const hit = this.hit(drag.from); this.page.choose(hit); } }
    else if (drag?.label && JSON.stringify(drag.label) !== JSON.stringify(this.page.visible()[drag.number].label)) this.page.replace(drag.number, drag.label);
    this.draw();
  }

  hit([x, y]) { return this.page.visible().findLastIndex(({ label }) => { if (!label.box && !label.polygon) return false; const [l, t, r, b] = bounds(label); return x >= l && x <= r && y >= t && y <= b; }); }

  addPoint(at) {
    at = clamp(at, this.size);
    const first = this.points[0], near = 9 * this.pixel();
    if (this.points.length > 2 && Math.hypot(first[0] - at[0], first[1] - at[1]) < near) { this.closePolygon(); return; }
    const last = this.points.at(-1);
    if (!last || last[0] !== at[0] || last[1] !== at[1]) this.points.push(at);
    this.draw();
  }

  closePolygon() {
    const points = this.points;
    if (points.length < 3) return;
    this.points = []; this.page.add({ polygon: [points] });
  }
}
