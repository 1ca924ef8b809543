// The page: an image goes to one model or two; what they say and where they look comes back.
"use strict";

const get = id => document.getElementById(id);
const HEAT = [[0, 0, 4], [28, 16, 68], [79, 18, 123], [129, 37, 129], [181, 54, 122], [229, 80, 100], [251, 135, 97], [254, 194, 135], [252, 253, 191]];
const VEIL = [0.35, 0.75]; // opacity where there is least and most attention, as the server has it
const NOT_ROLLOUT = "It is not the reason for the answer: it follows attention alone and is the same for every class.";
const NONE = "none";
const FEW = 6;
const SIMILAR = 20;
const THUMBNAILS_AT_ONCE = 2;

let models = [];
let key = null;
let file = null; // the image that is shown
let address = null; // its URL, for the browser's own use
let asking = new AbortController(); // ends the requests of an image that another has replaced
let panels = [];
let point = null; // where the pointer is in what the models see: from 0 to 1, or null
let held = false;

// --- the server ------------------------------------------------------------------------------------------------------

async function ask(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = body.type || "application/octet-stream";
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", headers, body, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw trouble("The server does not answer. Is it still running?", true);
  }
  if (answer.ok) return answer;
  if (answer.status === 401) lock();
  const problem = await answer.json().catch(() => ({ error: `The server answered ${answer.status}.` }));
  const kinds = problem.error.match(/not an image of a known format \((.*)\)/);
  if (kinds || answer.status === 415) throw trouble(`This is not an image.${kinds ? ` Known kinds are ${kinds[1]}.` : ""}`, false);
  throw trouble(sentence(problem.error, answer.headers.get("Retry-After")), answer.status >= 500);
}

// An error that may be gone when the same is asked again, or one that will not.
function trouble(text, passing) {
  return Object.assign(new Error(text), { passing });
}

function sentence(text, seconds) {
  const said = text.charAt(0).toUpperCase() + text.slice(1).replace(/\.?$/, ".");
  return seconds ? `${said} Try again in ${seconds} s.` : said;
}

function lock() {
  get("locked").hidden = false;
  get("key").focus();
}

async function start() {
  try {
    models = (await (await ask("/v1/models")).json()).models;
  } catch (error) {
    if (get("locked").hidden) complain(error);
    return;
  }
  get("locked").hidden = true;
  get("problem").hidden = true;
  const options = models.map(model => new Option(model.name, model.name));
  get("first").replaceChildren(...options);
  get("second").replaceChildren(new Option("nothing", NONE), ...options.map(option => option.cloneNode(true)));
  get("beside").hidden = models.length < 2;
  if (models.length > 1) get("second").value = models[1].name;
  count();
}

const chosenModel = () => models.find(model => model.name === get("first").value);

function count() {
  const { classes } = chosenModel();
  get("list").textContent = `${classes.toLocaleString("en")} class${classes === 1 ? "" : "es"}`;
  get("list").hidden = !classes;
}

// What the chosen model can answer.
async function list() {
  try {
    const { model, classes } = await (await ask(`/v1/classes?model=${encodeURIComponent(chosenModel().name)}`)).json();
    get("classes-title").textContent = `What ${model} can answer`;
    get("classes").querySelector("ul").replaceChildren(...classes.map(name => Object.assign(document.createElement("li"), { textContent: name })));
    get("classes").showModal();
  } catch (error) {
    complain(error);
  }
}

// --- an image --------------------------------------------------------------------------------------------------------

async function show(chosen) {
  if (!chosen || !models.length) return;
  asking.abort();
  asking = new AbortController();
  if (address) URL.revokeObjectURL(address);
  file = chosen;
  address = URL.createObjectURL(file);
  point = null;
  held = false;
  get("problem").hidden = true;
  document.body.classList.add("busy");
  const names = [get("first").value, get("second").value].filter((name, place, all) => name && name !== NONE && all.indexOf(name) === place);
  const fresh = names.map(name => panel(models.find(model => model.name === name)));
  const signal = asking.signal;
  try {
    const said = await Promise.all(fresh.map(each => each.predict(signal)));
    panels = fresh;
    get("panels").replaceChildren(...panels.map(each => each.element));
    get("panels").classList.toggle("two", panels.length > 1);
    get("similar").hidden = true;
    get("shown").hidden = false;
    document.body.classList.add("asked");
    get("status").textContent = said.join(" ");
    await Promise.all([...panels.map(each => each.look(signal)), showSimilar(signal)]);
  } catch (error) {
    if (error.name !== "AbortError") {
      if (panels !== fresh) clear();
      complain(error);
    }
  } finally {
    if (!signal.aborted) document.body.classList.remove("busy");
  }
}

// An answer to another image must not stand beside a refusal.
function clear() {
  panels = [];
  get("panels").replaceChildren();
  get("shown").hidden = true;
  get("similar").hidden = true;
  get("status").textContent = "";
  document.body.classList.remove("asked");
}

function complain(error) {
  get("problem").firstElementChild.textContent = error.message;
  get("again").hidden = !file || !error.passing;
  get("problem").hidden = false;
}

// --- similar images of the served index ------------------------------------------------------------------------------

async function showSimilar(signal) {
  const indexed = models.find(model => model.indexed_images);
  if (!indexed) return;
  const [{ neighbors }] = (await (await ask(`/v1/search?top=${SIMILAR}`, file, signal)).json()).results;
  get("similar-title").textContent = `Most similar of ${indexed.indexed_images.toLocaleString("en")} images, by the features of ${indexed.name}`;
  const items = neighbors.map(describeNeighbor);
  get("similar").querySelector("ol").replaceChildren(...items);
  get("similar").hidden = false;
  const waiting = neighbors.map((neighbor, place) => [neighbor, items[place]]).filter(([neighbor]) => neighbor.thumbnail);
  const load = async () => { while (waiting.length) await loadThumbnail(...waiting.shift(), signal); };
  await Promise.all(Array.from({ length: THUMBNAILS_AT_ONCE }, load));
}

function describeNeighbor(neighbor) {
  const item = get("neighbor").content.firstElementChild.cloneNode(true);
  item.querySelector(".similarity").textContent = neighbor.similarity.toFixed(3);
  item.querySelector(".file").textContent = neighbor.image;
  item.title = neighbor.image;
  return item;
}

// One that cannot be shown leaves its name alone.
async function loadThumbnail(neighbor, item, signal) {
  let answer;
  try {
    answer = await ask(`/v1/thumbnail?row=${neighbor.row}`, null, signal);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return;
  }
  const url = URL.createObjectURL(await answer.blob());
  const image = document.createElement("img");
  image.onload = () => URL.revokeObjectURL(url);
  image.alt = neighbor.image;
  image.src = url;
  item.querySelector(".thumbnail").replaceChildren(image);
}

// --- one model's view of it ------------------------------------------------------------------------------------------

function panel(model) {
  const element = get("panel").content.firstElementChild.cloneNode(true);
  const part = name => element.querySelector(name);
  const query = `model=${encodeURIComponent(model.name)}`;
  const layers = new Map();
  const slider = part(".layer input");
  let head = null; // the one chosen, or null for the mean of all
  element.setAttribute("aria-label", model.name);
  part("h2").textContent = model.name;
  if (touched()) part(".stage").setAttribute("aria-label", "The image, patch by patch: tap one to see what it looks at");

  async function predict(signal) {
    const [result] = (await (await ask(`/v1/predict?${query}&top=5`, file, signal)).json()).results;
    const chosen = model.has_label_thresholds ? result.predictions.filter(each => each.predicted) : result.predictions.slice(0, 1);
    part(".verdict").textContent = chosen.map(each => each.label).join(", ") || "no label";
    part(".unsure").hidden = !result.unsure;
    part(".several").hidden = !model.has_label_thresholds;
    part(".bars").classList.toggle("marked", model.has_label_thresholds);
    part(".bars").replaceChildren(...result.predictions.map(bar));
    place(result.crop);
    const said = chosen.map(each => `${each.label}, ${percent(each.probability)}`).join("; ") || "no label";
    return `${model.name}: ${said}${result.unsure ? ", unsure" : ""}.`;
  }

  function place([left, top, right, bottom]) {
    const photo = part(".photo");
    photo.alt = `The image${file.name ? `, ${file.name}` : ""}`;
    photo.onload = () => { part(".stage").style.maxWidth = `min(100%, ${(62 * photo.naturalWidth) / photo.naturalHeight}vh)`; };
    photo.onerror = () => { part(".where").textContent = "This browser cannot show this kind of file; the model has seen it all the same."; };
    photo.src = address;
    const [rows, columns] = model.grid || [1, 1];
    part(".seen").style.setProperty("--rows", rows);
    part(".seen").style.setProperty("--columns", columns);
    Object.assign(part(".seen").style, { left: share(left), top: share(top), width: share(right - left), height: share(bottom - top) });
  }

  async function look(signal) {
    if (!model.layers) {
      part(".where").textContent = "A ResNet has no attention to show.";
      return;
    }
    element.classList.add("busy");
    try {
      const picture = await (await ask(`/v1/explain?${query}&background=none`, file, signal)).blob();
      const rollout = part(".rollout");
      const url = URL.createObjectURL(picture);
      rollout.onload = () => URL.revokeObjectURL(url);
      rollout.src = url;
      rollout.alt = "Attention rollout: bright where the model looked most";
      rollout.hidden = false;
      part(".legend").hidden = false;
      part(".picture").classList.add("veiled");
      slider.max = slider.value = model.layers;
      part(".inside").hidden = false;
      part(".heads").classList.toggle("few", model.heads <= FEW);
      part(".heads").replaceChildren(...Array.from({ length: model.heads }, (_, number) => button(number)));
      await layer();
    } finally {
      element.classList.remove("busy");
    }
  }

  async function layer() {
    const number = Number(slider.value);
    part(".layer output").textContent = `${number} of ${model.layers}`;
    if (!layers.has(number)) {
      const found = await (await ask(`/v1/attention?${query}&layer=${number}`, file, asking.signal)).json();
      layers.set(number, Uint8Array.from(atob(found.maps), each => each.charCodeAt(0)));
    }
    if (number === Number(slider.value)) draw();
  }

  function button(number) {
    const found = document.createElement("button");
    found.type = "button";
    found.className = "head";
    found.setAttribute("aria-pressed", "false");
    const canvas = document.createElement("canvas");
    [canvas.height, canvas.width] = model.grid;
    found.append(canvas, `head ${number + 1}`);
    found.onclick = () => {
      head = head === number ? null : number;
      draw();
    };
    return found;
  }

  // The row of the maps that is meant: 0 is the class token, then the patches.
  function patch() {
    if (!point) return null;
    const [rows, columns] = model.grid;
    return [Math.min(rows - 1, Math.floor(point.y * rows)), Math.min(columns - 1, Math.floor(point.x * columns))];
  }

  function draw() {
    if (!model.layers) return;
    const at = patch();
    const [rows, columns] = model.grid;
    mark(at);
    const maps = layers.get(Number(slider.value));
    if (!maps) return;
    const count = rows * columns;
    const row = at ? 1 + at[0] * columns + at[1] : 0;
    const of = number => maps.subarray((number * (1 + count) + row) * count, (number * (1 + count) + row + 1) * count);
    [...part(".heads").children].forEach((each, number) => {
      each.setAttribute("aria-pressed", String(head === number));
      paint(each.firstChild, of(number), false);
    });
    const shown = head === null ? mean(Array.from({ length: model.heads }, (_, number) => of(number))) : of(head);
    const own = at !== null || head !== null;
    part(".map").hidden = !own;
    part(".rollout").hidden = own;
    [part(".map").height, part(".map").width] = model.grid;
    if (own) paint(part(".map"), shown, true);
    tell(at, shown);
  }

  function mark(at) {
    const frame = part(".patch");
    const [rows, columns] = model.grid;
    frame.hidden = !at;
    frame.classList.toggle("held", held);
    if (at) Object.assign(frame.style, { left: share(at[1] / columns), top: share(at[0] / rows), width: share(1 / columns), height: share(1 / rows) });
  }

  function tell(at, shown) {
    const columns = model.grid[1];
    const most = shown.indexOf(Math.max(...shown));
    const who = head === null ? `layer ${slider.value}, all heads` : `layer ${slider.value}, head ${head + 1}`;
    const where = `row ${Math.floor(most / columns) + 1}, column ${(most % columns) + 1}`;
    part(".where").textContent = at
      ? `${held ? "Held: " : ""}the patch in row ${at[0] + 1}, column ${at[1] + 1} looks most at ${where} (${who}).`
      : head === null ? `Attention rollout: what reached the answer, over all layers. ${NOT_ROLLOUT}` : `What the answer's token looks at: most at ${where} (${who}).`;
    part(".hint").textContent = at
      ? `Each square is one head, seen from that patch. ${touched() ? "Tap" : "Choose"} one to lay it over the image.`
      : touched() ? "Tap a patch of the image to see what it looks at." : "Point at a patch of the image, or reach it with the arrow keys, to see what it looks at.";
  }

  slider.oninput = () => layer().catch(error => error.name === "AbortError" || complain(error));
  follow(part(".stage"), part(".seen"), model.grid || [1, 1]);
  return { element, predict, look, draw };
}

function bar({ label, probability, threshold, predicted }) {
  const item = document.createElement("li");
  const name = document.createElement("div");
  name.className = "name";
  for (const text of [label, percent(probability)]) name.append(Object.assign(document.createElement("span"), { textContent: text }));
  const track = document.createElement("i");
  track.style.setProperty("--share", share(probability));
  if (threshold !== undefined) {
    track.style.setProperty("--threshold", share(threshold));
    track.title = `threshold ${percent(threshold)}`;
    item.classList.toggle("predicted", predicted);
  }
  item.append(name, track);
  return item;
}

const percent = value => (value >= 0.0995 ? `${Math.round(100 * value)} %` : `${(100 * value).toFixed(1)} %`);
const share = value => `${100 * value}%`;

function mean(maps) {
  return maps[0].map((_, place) => maps.reduce((sum, map) => sum + map[place], 0) / maps.length);
}

// Whether fingers do what a mouse does elsewhere.
const touched = () => matchMedia("(pointer: coarse)").matches;

// A map as colors, those of the report. Laid over an image it is a veil, the denser the more attention there is.
function paint(canvas, values, veil) {
  const pen = canvas.getContext("2d");
  const picture = pen.createImageData(canvas.width, canvas.height);
  const most = Math.max(1, ...values);
  values.forEach((value, place) => picture.data.set(veil ? veiled(value / most) : heated(value / most), 4 * place));
  pen.putImageData(picture, 0, 0);
}

// Roots, since a few patches have most of the attention: what the others have would not be seen.
function heated(value) {
  const at = Math.sqrt(value) * (HEAT.length - 1);
  const low = Math.min(HEAT.length - 2, Math.floor(at));
  return [...HEAT[low].map((from, channel) => from + (at - low) * (HEAT[low + 1][channel] - from)), 255];
}

function veiled(value) {
  return [...heated(value).slice(0, 3), 255 * (VEIL[0] + (VEIL[1] - VEIL[0]) * Math.sqrt(value))];
}

// --- pointing at patches: by mouse, finger or arrow keys; both models follow ----------------------------------------

function follow(stage, seen, [rows, columns]) {
  const move = to => {
    point = to;
    panels.forEach(each => each.draw());
  };
  const under = event => {
    const box = seen.getBoundingClientRect();
    const found = { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
    return found.x >= 0 && found.x < 1 && found.y >= 0 && found.y < 1 ? found : null;
  };
  stage.onpointermove = event => { if (!held && event.pointerType !== "touch") move(under(event)); };
  stage.onpointerleave = () => { if (!held) move(null); };
  stage.onclick = event => {
    held = !held || event.pointerType === "touch";
    move(under(event));
    if (!point) held = false;
  };
  stage.onkeydown = event => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") {
      held = false;
      move(null);
    } else if (event.key === "Enter" && point) {
      held = !held;
      move(point);
    } else if (step) {
      const inside = (value, count) => (Math.min(count - 1, Math.max(0, value)) + 0.5) / count;
      const column = point ? Math.floor(point.x * columns) + step[0] : Math.floor(columns / 2);
      const row = point ? Math.floor(point.y * rows) + step[1] : Math.floor(rows / 2);
      held = true;
      move({ x: inside(column, columns), y: inside(row, rows) });
    } else {
      return;
    }
    event.preventDefault();
  };
}

// --- what a person does ----------------------------------------------------------------------------------------------

get("choose").onclick = () => get("file").click();
get("photograph").onclick = () => get("camera").click();
for (const name of ["file", "camera"]) {
  get(name).onchange = event => {
    show(event.target.files[0]);
    event.target.value = "";
  };
}
for (const name of ["first", "second"]) {
  get(name).onchange = () => {
    count();
    show(file);
  };
}
get("list").onclick = list;
get("again").onclick = () => show(file);
get("locked").onsubmit = event => {
  event.preventDefault();
  key = get("key").value;
  start();
};
get("opacity").oninput = event => {
  get("opacity-text").textContent = `${event.target.value} %`;
  document.documentElement.style.setProperty("--veil", event.target.value / 100);
};
document.onpaste = event => show([...event.clipboardData.files][0]);
document.ondragover = event => {
  event.preventDefault();
  document.body.classList.add("over");
};
document.ondragleave = event => { if (!event.relatedTarget) document.body.classList.remove("over"); };
document.ondrop = event => {
  event.preventDefault();
  document.body.classList.remove("over");
  show(event.dataTransfer.files[0]);
};
start();
