// Draws the frames that come in chunks at a steady rate, on as many canvases as there are films.
const box = element.querySelector('.films');
const status = element.querySelector('.status');
const MOST_AHEAD = 1.5;  // seconds
let job = null, films = [], timer = null, fps = 1, shown = 0, underruns = 0, times = [];

function start(value) {
  job = value.job;
  shown = underruns = 0;
  times = [];
  box.replaceChildren();
  films = value.titles.map(() => {
    const figure = document.createElement('figure');
    const canvas = document.createElement('canvas');
    const caption = document.createElement('figcaption');
    canvas.width = value.width;
    canvas.height = value.height;
    figure.append(canvas, caption);
    box.append(figure);
    return {canvas, caption, latest: -1, frames: []};
  });
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
  tell(rate.toFixed(1) + ' frames a second, waited ' + underruns + ' times, ' + films[0].frames.length + ' ahead');
}

function tell(text) {
  status.textContent = 'frame ' + shown + ': ' + text;
  box.dataset.shown = shown;
}

function take() {
  const value = props.value;
  if (!value || typeof value === 'string' || !value.job) return;
  if (value.job !== job) start(value);
  value.films.forEach((chunks, number) => {
    const film = films[number];
    film.caption.textContent = value.titles[number];
    film.canvas.setAttribute('aria-label', value.titles[number]);
    for (const chunk of chunks) {
      if (chunk.number <= film.latest) continue;
      film.latest = chunk.number;
      chunk.frames.forEach((jpeg) => film.frames.push({jpeg, marked: chunk.marked}));
    }
  });
  if (value.over) {
    clearInterval(timer);
    films.forEach((film) => { film.frames = []; });
    tell(value.over);
  }
}

watch('value', take);
