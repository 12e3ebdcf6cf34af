"use strict";
const $ = (id) => document.getElementById(id);
for (const one of document.querySelectorAll("[data-script]")) one.hidden = false;

// The timeline: everything in it is placed in percent, so that zooming is a matter of its width.
{
  const scroller = $("scroller"), rows = $("rows"), axis = rows.querySelector(".axis .track");
  const end = Number(rows.dataset.end), most = 500;
  const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
  let zoom = 1;

  const track = () => axis.getBoundingClientRect().width;
  function zoomTo(wanted, at = 0.5) {
    const view = scroller.clientWidth - rows.querySelector(".label").offsetWidth;
    const place = (scroller.scrollLeft + at * view) / (view * zoom);
    zoom = Math.min(most, Math.max(1, wanted));
    rows.style.setProperty("--zoom", zoom);
    scroller.scrollLeft = place * view * zoom - at * view;
    drawAxis();
  }
  function drawAxis() {
    const width = track(), from = scroller.scrollLeft / width, to = from + scroller.clientWidth / width;
    const wanted = (end * 110) / width, power = 10 ** Math.floor(Math.log10(wanted));
    const steps = end > 120 && wanted > 1 ? CLOCK : [1, 2, 5, 10].map((one) => one * power);
    const step = steps.find((one) => one >= wanted) ?? wanted;
    const made = [];
    for (let tick = Math.floor((from * end) / step); tick * step <= Math.min(end, to * end); tick++) {
      const x = `${(100 * tick * step) / end}%`;
      const line = node("line", { x1: x, x2: x, y1: 17, y2: 24 }), text = node("text", { x, y: 14, dx: 2 });
      text.textContent = clock(tick * step, step);
      made.push(line, text);
    }
    axis.replaceChildren(...made);
  }
  function node(name, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }
  function clock(seconds, step) {
    if (end <= 120) return step < 0.001 ? `${+(seconds * 1000).toFixed(4)} ms` : `${+seconds.toFixed(4)} s`;
    const whole = Math.floor(seconds + 1e-9), two = (n) => String(n).padStart(2, "0");
    const rest = step < 1 ? (seconds - whole).toFixed(3).slice(1) : "";
    const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
    return `${hours ? `${hours}:${two(minutes)}` : minutes}:${two(whole % 60)}${rest}`;
  }
  $("in").onclick = () => zoomTo(zoom * 2);
  $("out").onclick = () => zoomTo(zoom / 2);
  $("fit").onclick = () => zoomTo(1);
  scroller.addEventListener("scroll", drawAxis);
  addEventListener("resize", drawAxis);
  scroller.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    const label = rows.querySelector(".label").offsetWidth;
    const left = scroller.getBoundingClientRect().left + label;
    zoomTo(zoom * 1.2 ** (-event.deltaY / 50), Math.max(0, (event.clientX - left) / (scroller.clientWidth - label)));
  }, { passive: false });
  scroller.addEventListener("keydown", (event) => {
    const to = { "+": zoom * 2, "=": zoom * 2, "-": zoom / 2, 0: 1 }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    zoomTo(to);
  });
  rows.addEventListener("click", (event) => {
    const rank = event.target.closest("button[data-rank]"), one = event.target.closest("[data-text]");
    if (one) $("detail").textContent = one.dataset.text;
    if (!rank) return;
    $("ranks").value = rank.dataset.rank;
    filter();
    $("output").scrollIntoView();
  });
  drawAxis();
}

// The output: chunks are unpacked one after the other, and only the lines that can be seen are in the page.
const ROW = 20, MOST_PIXELS = 8e6, MOST_SHOWN = 5000;
const box = $("lines"), packed = [...document.querySelectorAll("script.chunk")], chunks = [];
let turn = 0, hits = [], sums = [0], sought = null, first = 0, scrolled = 0;

async function unpack(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
}

async function chunk(number) {
  if (chunks[number]) return chunks[number];
  const whole = await unpack(packed[number].textContent), head = whole.indexOf("\n");
  const starts = [];
  for (let at = head + 1; at > head && at < whole.length; at = whole.indexOf("\n", at) + 1) starts.push(at);
  let line = 0;
  const runs = JSON.parse(whole.slice(0, head)).map(([count, attempt, rank, stream, time]) => {
    line += count;
    return { begin: line - count, end: line, attempt, rank, stream, time };
  });
  packed[number].textContent = "";
  return (chunks[number] = { whole, starts: Uint32Array.from(starts), runs });
}

function lineOf({ whole, starts }, line) {
  return whole.slice(starts[line], (line + 1 < starts.length ? starts[line + 1] : whole.length) - 1);
}

// The numbers of the lines that are wanted; null for all.
function match(one, wanted) {
  if (!wanted.ranks && wanted.streams === 3 && !wanted.text) return null;
  const found = [], { whole, starts, runs } = one, text = wanted.text;
  if (text) text.lastIndex = starts[0];
  let next = text ? find() : 0;
  function find() {
    const hit = text.exec(whole);
    if (!hit) return Infinity;
    let low = 0, high = starts.length;
    while (high - low > 1) starts[(low + high) >> 1] <= hit.index ? (low = (low + high) >> 1) : (high = (low + high) >> 1);
    return low;
  }
  for (const run of runs) {
    const ok = (!wanted.ranks || wanted.ranks(run.rank)) && wanted.streams & run.stream;
    if (!text) {
      if (ok) for (let line = run.begin; line < run.end; line++) found.push(line);
      continue;
    }
    if (!ok && next < run.end) {
      text.lastIndex = run.end < starts.length ? starts[run.end] : whole.length;
      next = run.end < starts.length ? find() : Infinity;
    }
    while (next < run.end) {
      found.push(next);
      if (next + 1 >= starts.length) next = Infinity;
      else {
        text.lastIndex = starts[next + 1];
        next = find();
      }
    }
  }
  return Uint32Array.from(found);
}

function wishes() {
  const parts = $("ranks").value.split(/[\s,]+/).filter(Boolean).map((one) => one.split("-").map(Number));
  const text = $("text").value.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return {
    ranks: parts.length ? (rank) => parts.some(([from, to = from]) => from <= rank && rank <= to) : null,
    streams: $("stdout").checked * 1 + $("stderr").checked * 2,
    text: text && new RegExp(text, "gi"),
  };
}

async function filter() {
  const mine = ++turn, wanted = wishes();
  let shown = performance.now();
  hits = [];
  sums = [0];
  sought = wanted.text;
  first = scrolled = box.scrollTop = 0;
  for (let number = 0; number < packed.length; number++) {
    const one = await chunk(number);
    if (mine !== turn) return;
    hits[number] = match(one, wanted);
    sums.push(sums[number] + (hits[number] ?? one.starts).length);
    if (performance.now() - shown > 40) {
      draw(`reading, ${Math.round((100 * number) / packed.length)} %`);
      await new Promise((go) => setTimeout(go));
      shown = performance.now();
      if (mine !== turn) return;
    }
  }
  draw();
}

// More lines than a page can be high: then a small movement scrolls by lines, and a large one by its share of the whole.
function scroll() {
  const total = sums.at(-1), view = box.clientHeight, height = Math.min(total * ROW, MOST_PIXELS), now = box.scrollTop;
  const last = Math.max(0, total - view / ROW);
  if (total * ROW <= MOST_PIXELS) first = now / ROW;
  else if (now <= 0 || now >= height - view - 1) first = now <= 0 ? 0 : last;
  else if (Math.abs(now - scrolled) <= view) first += (now - scrolled) / ROW;
  else first = (now / (height - view)) * last;
  first = Math.min(last, Math.max(0, first));
  scrolled = now;
  draw();
}

let said = "";
function draw(state = "") {
  const total = sums.at(-1), all = chunks.reduce((sum, one) => sum + one.starts.length, 0);
  $("height").style.height = `${Math.min(total * ROW, MOST_PIXELS)}px`;
  const text = state || (total === all ? `${all.toLocaleString("en")} lines` : `${total.toLocaleString("en")} of ${all.toLocaleString("en")} lines`);
  if (text !== said) $("count").textContent = said = text;
  const begin = Math.floor(first), made = [];
  let number = 0;
  for (let row = begin; row < Math.min(total, begin + box.clientHeight / ROW + 2); row++) {
    while (sums[number + 1] <= row) number++;
    const place = row - sums[number];
    made.push(drawn(chunks[number], hits[number] ? hits[number][place] : place));
  }
  $("window").replaceChildren(...made);
  $("window").style.transform = `translateY(${box.scrollTop - (first - begin) * ROW}px)`;
}

function drawn(one, line) {
  let low = 0, high = one.runs.length;
  while (high - low > 1) one.runs[(low + high) >> 1].begin <= line ? (low = (low + high) >> 1) : (high = (low + high) >> 1);
  const run = one.runs[low], made = cell("div", run.stream === 2 ? "l err" : "l", "");
  let text = lineOf(one, line);
  if (text.length > MOST_SHOWN) text = `${text.slice(0, MOST_SHOWN)} … (${text.length - MOST_SHOWN} more characters)`;
  made.title = `attempt ${run.attempt}, ${run.stream === 2 ? "stderr" : "stdout"}`;
  made.append(cell("span", "t", run.time < 0 ? "" : (run.time / 1000).toFixed(2)), cell("span", "r", `[${run.rank}]`), marked(text));
  return made;
}

function marked(text) {
  const made = cell("span", "x", "");
  let at = 0;
  for (const hit of sought ? text.matchAll(sought) : []) {
    made.append(text.slice(at, hit.index), cell("mark", "", hit[0]));
    at = hit.index + hit[0].length;
  }
  made.append(text.slice(at));
  return made;
}

function cell(name, kind, text) {
  const made = document.createElement(name);
  made.className = kind;
  made.textContent = text;
  return made;
}

box.addEventListener("scroll", scroll);
addEventListener("resize", () => draw());
$("filter").addEventListener("input", filter);
$("filter").addEventListener("submit", (event) => event.preventDefault());
addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  $("fit").click();
});
filter();
