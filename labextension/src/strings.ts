/**
 * Every word of the panel that is not the kernel's: in one place, so that they agree, and can be translated.
 *
 * Figures and their notes come from nbdist/panel; numbers are written by `words`.
 */

export const ranks = "Ranks";
export const worthALook = "Ranks worth a look";
export const looking = "looking …";
export const close = "Close";
export const pause = "Pause";
export const resume = "Resume";
export const measurePeak = "Measure the peak";
export const updateInterval = "Update interval";
export const whatTheMapShows = "What the map shows";
export const thisMachine = "this machine";
export const peak = "peak of tensors";
export const free = "free";
export const dead = "✕ dead";
export const marked = "⚠ worth a look";
export const median = "the median";
export const outsideTorch = "outside torch";
export const rankAlone = "a rank";
export const elseInUse = "everything else in use";

export const paused = "‖ paused";
export const live = "● live";
export const sessionEnded = "■ session ended";
export const kernelRestarted = "■ kernel restarted";
export const silentFor = (time: string): string => `◌ silent for ${time}`;

export const runAgain = "The kernel was restarted: run the cell again.";
export const kernelEnded = "The kernel behind this panel has ended: run the cell again.";
export const rateLater = "The new rate takes effect when the running cell ends.";
export const peakRequested = "The peak is being measured on all ranks.";
export const peakLater = "The peak will be measured when the running cell ends.";
export const snapshotOf = (rank: string): string => `Memory snapshot of ${rank}`;
export const snapshotRequested = (rank: string): string => `A memory snapshot of ${rank} was requested.`;
export const snapshotLater = " It will be written when the running cell ends.";
export const moreWorthALook = (count: number): string => `… and ${count} more worth a look`;
export const sampledEvery = (seconds: number): string => `sampled every ${seconds} s`;
export const every = (seconds: number): string => (seconds === 1 ? "every second" : `every ${seconds} s`);
export const rankOn = (rank: string, device: string): string => `${rank} on ${device}`;
export const overTime = (label: string): string => `${label}, the last minutes; bands are cells`;

export const parts = {
  allocated: "tensors",
  cache: "torch's cache",
  non_torch: "CUDA and NCCL",
  process: "the rank, as the driver reports it",
  others: "other processes",
  kept: "kept by the driver",
};
export const asNvidiaSmi = "used / total: of all processes, as nvidia-smi reports them";

export const metrics = {
  memory: { name: "memory in use", less: "25 % of the device less", more: "25 % more" },
  utilization: { name: "utilization", less: "25 points less", more: "25 points more" },
  temperature: { name: "temperature", less: "15 °C cooler", more: "15 °C hotter" },
  step: { name: "step without collectives", less: "20 % shorter", more: "20 % longer" },
};

export const headings = {
  rank: "rank",
  device: "device",
  memoryOfDevice: "memory of the device",
  memoryOfRank: "memory of the rank, compared to the largest",
  usedOfTotal: "used / total",
  memory: "memory",
  utilizationLately: "utilization",
  memoryLately: "lately",
  utilization: "util",
  temperature: "temp",
  power: "power",
  cpu: "CPU",
  state: "state",
};

export const facts = {
  device: "device",
  process: "process",
  state: "state",
  tensors: "tensors",
  peakOfTensors: "peak of tensors",
  cache: "torch's cache",
  nonTorch: "CUDA and NCCL",
  utilization: "utilization",
  temperature: "temperature",
  power: "power",
  cpu: "CPU, of one core",
  own: "its own memory",
  step: "step",
  work: "of it without collectives",
  speed: "speed",
  mfu: "MFU",
  worthALook: "worth a look",
  unknown: "not known",
};

export const spoken = {
  memory: (amount: string): string => `memory ${amount}`,
  utilization: (share: string): string => `utilization ${share}`,
  cpu: (share: string): string => `CPU ${share}`,
  step: (time: string): string => `step ${time}`,
  peak: (amount: string): string => `peak ${amount}`,
};
