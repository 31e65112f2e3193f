// Flips and shifts of training images, drawn on demand.
//
// A draw is a pure function of (seed, epoch, index of the image in the data set). The draw is independent of
// ranks, batches, timing and the step from which a run resumed. Evaluation does not augment.
#pragma once

#include <cstdint>

#include "trainer/config/config.h"

namespace gradwire {

struct AugmentDraw {
  bool flip = false;       // horizontal
  int32_t dy = 0, dx = 0;  // pixel (y, x) of the crop is pixel (y + dy, x + dx) of the image; black outside
};

// Returns the padding for crops, in pixels: an eighth of the side, rounded up; 4 for 28 and 32 pixels. Crops
// equal torchvision's RandomCrop(side, padding): pad with zeros (black) before normalization, then take a
// window at a uniformly random offset.
int32_t crop_padding(int32_t side);

AugmentDraw draw_augmentation(const Augmentation& which, uint64_t seed, int64_t epoch, int64_t image,
                              int32_t height, int32_t width);

// Normalizes one channel of an image, (height, width): to[y][x] = pixel * scale + shift, where `pixel` is
// taken from the crop, flipped after cropping. Reads 1 byte and writes 4 bytes per pixel. No alignment
// required.
void normalize_plane(const uint8_t* pixels, int32_t height, int32_t width, const AugmentDraw& draw,
                     float scale, float shift, float* to);

}  // namespace gradwire
