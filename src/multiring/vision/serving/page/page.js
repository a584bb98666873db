// Sends a picture to a model and shows the answer.

const of = (id) => document.getElementById(id);
const COLOURS = ["#d33", "#27c", "#292", "#b0b", "#c70", "#077"];
let last = 0;

function headers() {
  const token = of("token").value.trim();
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function asked(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.status === 401) of("token-label").hidden = false;
  const told = await response.json();
  if (!response.ok) throw new Error(told.error);
  return told;
}

async function listModels() {
  try {
    const models = await asked("v2/repository/index", { method: "POST" });
    of("model").replaceChildren(
      ...models.map((each) => new Option(`${each.name}, version ${each.version}`, `${each.name}/versions/${each.version}`)),
    );
    of("said").textContent = "";
  } catch (error) {
    of("said").textContent = error.message;
  }
}

function drawBox(context, label, colour) {
  const [left, top, width, height] = label.box;
  context.lineWidth = Math.max(2, context.canvas.width / 300);
  context.strokeStyle = colour;
  context.strokeRect(left, top, width, height);
}

function drawMask(context, label, colour) {
  const [width, height] = label.mask.size;
  context.fillStyle = colour;
  context.globalAlpha = 0.5;
  let place = 0;
  label.mask.runs.forEach((run, number) => {
    const end = place + run;
    while (number % 2 && place < end) {
      const column = Math.floor(place / height);
      const length = Math.min(end, (column + 1) * height) - place;
      if (column < width) context.fillRect(column, place % height, 1, length);
      place += length;
    }
    place = end;
  });
  context.globalAlpha = 1;
}

async function tryPicture() {
  const [file] = of("file").files;
  if (!file || !of("model").value) return;
  const mine = ++last;
  of("said").textContent = "…";
  of("labels").replaceChildren();
  try {
    const told = await asked(`v2/models/${of("model").value}/picture`, { method: "POST", body: file });
    const image = await createImageBitmap(file, { imageOrientation: "from-image" }).catch(() => null);
    if (mine !== last) return;
    const [answer] = told.answers;
    const canvas = of("shown");
    [canvas.width, canvas.height, canvas.hidden] = [answer.width, answer.height, false];
    const context = canvas.getContext("2d");
    if (image) context.drawImage(image, 0, 0, answer.width, answer.height);
    answer.labels.forEach((label, number) => {
      const colour = COLOURS[number % COLOURS.length];
      if (label.box) drawBox(context, label, colour);
      if (label.mask) drawMask(context, label, colour);
      const item = document.createElement("li");
      item.style.color = colour;
      item.textContent = `${label.class} ${(100 * label.score).toFixed(1)} %`;
      of("labels").append(item);
    });
    of("said").textContent = answer.labels.length ? "" : "nothing was found";
  } catch (error) {
    if (mine === last) of("said").textContent = error.message;
  }
}

of("form").addEventListener("submit", (event) => event.preventDefault());
of("token").addEventListener("change", () => listModels().then(tryPicture));
of("file").addEventListener("change", tryPicture);
of("model").addEventListener("change", tryPicture);
listModels();
