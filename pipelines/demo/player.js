// Draws the frames that come in chunks at a steady rate, on as many canvases as there are films;
// below them the prompts so far, and elsewhere on the page what each film takes.
const box = element.querySelector('.films');
const status = element.querySelector('.status');
const timeline = element.querySelector('.timeline');
const COLORS = ['#2f80ed', '#e8710a'];
const MOST_AHEAD = 1.5;  // seconds
let job = null, films = [], timer = null, fps = 1, shown = 0, underruns = 0, times = [];

function node(name, text = '', kind = '') {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function label(number, text) {
  const dot = node('i', '', 'dot'), key = node('span', '', 'key');
  dot.style.background = COLORS[number];
  key.append(dot, text);
  return key;
}

function start(value) {
  job = value.job;
  shown = underruns = 0;
  times = [];
  films = value.titles.map(() => {
    const figure = node('figure'), canvas = node('canvas'), caption = node('figcaption');
    canvas.width = value.width;
    canvas.height = value.height;
    figure.style.maxWidth = `calc(52vh * ${value.width / value.height})`;
    figure.append(canvas, caption);
    return {figure, canvas, caption, latest: -1, frames: []};
  });
  box.replaceChildren(...films.map((film) => film.figure));
  numbers().replaceChildren();
  clearInterval(timer);
  fps = value.fps;
  timer = setInterval(draw, 1000 / fps);
}

function draw() {
  if (!films.length || films.some((film) => !film.frames.length)) {
    underruns += shown ? 1 : 0;
    return;
  }
  const late = films[0].frames.length > MOST_AHEAD * fps;  // the browser draws too slowly
  for (const film of films) {
    if (late) film.frames.shift();
    const frame = film.frames.shift(), picture = new Image();
    picture.onload = () => {
      film.canvas.getContext('2d').drawImage(picture, 0, 0, film.canvas.width, film.canvas.height);
      film.canvas.style.outline = frame.marked ? '3px solid #e67e22' : 'none';
    };
    picture.src = 'data:image/jpeg;base64,' + frame.jpeg;
  }
  shown += late ? 2 : 1;
  times = [...times, performance.now()].slice(-25);
  const rate = (times.length - 1) / (times[times.length - 1] - times[0]) * 1000 || 0;
  const left = props.value.dropped ? `, ${props.value.dropped} pictures left out` : '';
  tell(`${rate.toFixed(1)} frames a second, waited ${underruns} times${left}`);
}

function tell(text) {
  status.textContent = `frame ${shown}: ${text}`;
  box.dataset.shown = shown;
}

function mark(value) {
  const ends = [...value.marks.slice(1).map((next) => next.frame), value.frames];
  timeline.replaceChildren(...value.marks.map((one, number) => {
    const part = node('span', one.text);
    part.style.flexGrow = Math.max(1, ends[number] - one.frame);
    part.style.flexBasis = 0;
    part.title = `from frame ${one.frame}: ${one.text}`;
    return part;
  }));
}

function numbers() {
  return document.querySelector('#numbers .plots');
}

function plot(value, unit, title) {
  const most = Math.max(...value.points.flatMap((point) => point[unit]), 1e-9);
  const first = value.points[0].second, last = value.points[value.points.length - 1].second;
  const made = node('figure', '', 'plot'), caption = node('figcaption');
  const lines = value.titles.map((_, film) => {
    const at = value.points.map((point) => [
      300 * (point.second - first) / Math.max(last - first, 1), 96 - 88 * point[unit][film] / most,
    ].map((number) => number.toFixed(1)).join());
    return `<polyline points="${at.join(' ')}" stroke="${COLORS[film]}"/>`;
  });
  made.innerHTML = `<svg viewBox="0 0 300 100" preserveAspectRatio="none">${lines.join('')}</svg>`;
  caption.append(`${title}, at most ${most.toFixed(most < 10 ? 2 : 0)}: `);
  const latest = value.points[value.points.length - 1][unit];
  value.titles.forEach((name, film) => {
    caption.append(label(film, `${name} ${latest[film]}`), ' ');
  });
  made.prepend(caption);
  return made;
}

function measure(value) {
  const folded = document.querySelector('#numbers details');
  if (value.points) {
    numbers().replaceChildren(plot(value, 'ms', 'A chunk takes, ms'), plot(value, 'MB', 'Held, MB'));
  }
  folded.hidden = false;
  folded.querySelector('table').replaceChildren(...[['', ...value.titles], ...value.table].map((row, at) => {
    const line = node('tr');
    line.append(...row.map((text) => node(at ? 'td' : 'th', text)));
    return line;
  }));
}

function take() {
  const value = props.value;
  if (!value || typeof value === 'string' || !value.job) return;
  if (value.job !== job) start(value);
  value.films.forEach((chunks, number) => {
    const film = films[number];
    film.caption.replaceChildren(label(number, value.titles[number]));
    film.canvas.setAttribute('aria-label', value.titles[number]);
    for (const chunk of chunks) {
      if (chunk.number <= film.latest) continue;
      film.latest = chunk.number;
      chunk.frames.forEach((jpeg) => film.frames.push({jpeg, marked: chunk.marked}));
    }
  });
  if (value.marks) mark(value);
  if (value.table) measure(value);
  if (value.over) {
    clearInterval(timer);
    films.forEach((film) => { film.frames = []; });
    tell(value.over);
  }
}

watch('value', take);
