/**
 * Puts text at the end of a stream that has become long, as JupyterLab does, but without its look at all of the stream.
 *
 * JupyterLab compares each character of a stream with what it would be after the next message, since that may write over
 * lines. That takes it 10 to 25 milliseconds for a stream of some megabytes. Text that writes over nothing needs none of it.
 */

import type { Outputs } from "./jupyter";

const WRITES_OVER = /[\b\r]/;

/** What JupyterLab's model of outputs keeps for itself: which stream goes on, where, and whether it is to be emptied. */
interface Private {
  _lastStreamName?: unknown;
  _streamIndex?: unknown;
  clearNext?: unknown;
}

interface Stream {
  output_type?: unknown;
  name?: unknown;
  text?: unknown;
}

/** Have streams of at least this length go on at their ends. Where JupyterLab keeps its place otherwise, nothing changes. */
export function appendToLongStreams(outputs: Outputs, long: number): void {
  const add = outputs.add.bind(outputs);
  const place: Private = outputs as Private;
  outputs.add = (output: Stream): number => {
    const { output_type: type, name, text } = output;
    if (type !== "stream" || typeof text !== "string" || outputs.length === 0) return add(output);
    const { streamText } = outputs.get(outputs.length - 1);
    const end = streamText?.text.length ?? 0;
    const goesOn = place.clearNext === false && place._lastStreamName === name && place._streamIndex === end;
    if (streamText === undefined || end < long || !goesOn || WRITES_OVER.test(text)) return add(output);
    streamText.insert(end, text);
    place._streamIndex = end + text.length;
    return outputs.length;
  };
}
