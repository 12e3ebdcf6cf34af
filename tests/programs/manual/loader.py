import torch.utils.data


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {}[f"image {i}"]


for _ in torch.utils.data.DataLoader(Images(), num_workers=2):
    pass
