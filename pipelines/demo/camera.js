// Sends pictures of a camera or a file while they come in, cut and scaled to the film's size here,
// so that neither a large picture nor a film file ever leaves this machine.
const BATCH = 3;  // pictures of a request
const find = (name) => element.querySelector(name);
const canvas = find('canvas'), chosen = find('.chosen'), said = find('.said'), file = find('input[type=file]');
canvas.width = props.width;
canvas.height = props.height;
let turn = 0;  // of what was picked: a browser may still ask when the next one is
let shown = null, timer = null, stream = null, url = null, number = 0, waiting = [];

function draw(wide, tall) {
  const scale = Math.max(canvas.width / wide, canvas.height / tall);
  const [w, h] = [canvas.width / scale, canvas.height / scale];
  const brush = canvas.getContext('2d');
  brush.imageSmoothingQuality = 'high';
  brush.drawImage(shown, (wide - w) / 2, (tall - h) / 2, w, h, 0, 0, canvas.width, canvas.height);
}

function send(files) {
  const use = find('input[name=use]:checked').value;
  props.value = {use, first: number - files.length, files};
  trigger('input');
}

function take() {
  const wide = shown.videoWidth || shown.naturalWidth, tall = shown.videoHeight || shown.naturalHeight;
  if (!wide) return;
  draw(wide, tall);
  waiting.push(canvas.toDataURL('image/jpeg', 0.9).split(',')[1]);
  number += 1;
  if (waiting.length >= BATCH) send(waiting.splice(0));
}

function leave() {
  turn += 1;
  clearInterval(timer);
  if (stream) stream.getTracks().forEach((track) => track.stop());
  if (url) URL.revokeObjectURL(url);
  shown = timer = stream = url = null;
  waiting = [];
  file.value = '';
}

function off(text = '') {
  const was = shown;
  leave();
  chosen.hidden = true;
  said.textContent = text;
  if (was) send([]);
}

function begin(picture, name) {
  shown = picture;
  chosen.hidden = false;
  said.textContent = `${name}: press Start`;
  clearInterval(timer);
  timer = setInterval(take, 1000 / props.fps);
}

function film(source) {
  const video = document.createElement('video');
  video.muted = video.playsInline = video.loop = true;
  Object.assign(video, source);
  const mine = turn;
  video.onerror = () => mine === turn && off('this browser cannot play that file');
  return video.play().then(() => video);
}

find('.camera').onclick = async () => {
  off();
  const mine = turn;
  if (!navigator.mediaDevices) {
    said.textContent = 'a browser gives its camera to pages of https and of this machine only';
    return;
  }
  try {
    const asked = await navigator.mediaDevices.getUserMedia({video: {width: {ideal: 320}}, audio: false});
    if (mine !== turn) {  // turned off meanwhile
      asked.getTracks().forEach((track) => track.stop());
      return;
    }
    stream = asked;  // which leave() stops from here on
    const video = await film({srcObject: asked});
    if (mine === turn) begin(video, 'the camera is on');
  } catch (error) {
    if (mine === turn) off(`no camera: ${error.message}`);
  }
};

file.onchange = async () => {
  const picked = file.files[0];
  if (!picked) return;
  off();
  const mine = turn;
  url = URL.createObjectURL(picked);
  try {
    if (picked.type.startsWith('video/')) {
      const video = await film({src: url});
      if (mine === turn) begin(video, picked.name);
    } else {
      const picture = new Image();
      picture.src = url;
      await picture.decode();
      if (mine === turn) begin(picture, picked.name);
    }
  } catch (error) {
    if (mine === turn) off(`this browser cannot read ${picked.name}`);
  }
};

find('.off').onclick = () => off();
